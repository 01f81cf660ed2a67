"""What the engine itself takes in an update, beside computing, sending and updating: measured on networks so small that
there is little else."""

import time
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import nn

from convoy.cost.costs import Costs
from convoy.cost.step import predict
from convoy.cost.times import Table, Times
from convoy.engine.parallelize import local_samples, take_part
from convoy.planning.ranks import Ranks
from convoy.planning.rehearse import rehearse
from convoy.planning.workload import Workload, momentum, workload_of
from convoy.plans.plan import Plan

_LAYERS = 4, 24
_WIDTH, _UPDATES, _ENOUGH = 16, 15, 6


def with_overhead(costs: Costs, workload: Workload, ranks: Ranks) -> Costs:
    """The costs, with the time of the engine for an update, and for each parameter whose gradient is exchanged.

    All ranks call it; one alone has nothing to exchange.
    """
    if ranks.num == 1:
        return costs
    what = "measuring the engine"
    few, many = (ranks.trying(what, partial(_residue, costs, workload, layers)) for layers in _LAYERS)
    per_parameter = max(0.0, (many - few) / (2 * (_LAYERS[1] - _LAYERS[0])))
    fixed = max(0.0, few - 2 * _LAYERS[0] * per_parameter)
    update = replace(costs.update, fixed=costs.update.fixed + fixed)
    return replace(costs, update=update, per_parameter=per_parameter)


def _residue(costs: Costs, workload: Workload, layers: int, ranks: Ranks) -> float:
    """Seconds of an update of a chain of layers that are not predicted."""
    plan = Plan.parse(f"sample={ranks.num}")
    images = torch.ones(2 * ranks.num, _WIDTH, device=workload.device)
    model = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)]).to(workload.device)
    chain = workload_of(model, images, len(images))
    found = rehearse(chain, chain.place(plan), ranks, alone=False, links=costs.links, enough=_ENOUGH)
    times = Table({one.key: taken for one, taken in found.times.items()}, lambda piece: Times())
    known = replace(costs, times=times, loss=replace(costs.loss, per_pass=found.around.total))
    measured = _update(model, plan, images, workload.device)
    return max(ranks.gather(measured)) - predict(chain.place(plan), known).total


def _update(model: nn.Module, plan: Plan, images: torch.Tensor, device: torch.device) -> float:
    take_part(model, plan, example=images[:2])
    mine = images[local_samples(model, len(images))]
    optimizer = momentum(list(model.parameters()))
    seconds = []
    for _ in range(_UPDATES):
        start = time.perf_counter()
        optimizer.zero_grad()
        model(mine).sum().backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[3:])
