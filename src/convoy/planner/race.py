"""Updates of a network under plans that are predicted to be fast, where no trainer makes them."""

import time
from statistics import median

import torch
from torch import Tensor, nn

from convoy.comm.ranks import Ranks
from convoy.engine.parallelize import accumulate, forward_backward, local_samples, take_part
from convoy.engine.profiling import steady
from convoy.graph.given import copied
from convoy.graph.tree import leaves
from convoy.ops.recompute import Recompute
from convoy.planner.cost.prediction import Scored
from convoy.planner.planner import Planned
from convoy.planner.profiling import autocast
from convoy.planner.workload import Workload

_MOST = 8  # updates under a plan


def race(model: nn.Module, recompute: Recompute, planned: Planned, racer: Scored, ranks: Ranks) -> float:
    """Seconds of an update of random samples under a plan, of the slowest rank; a ConvoyError where it cannot be run.
    All ranks, one for each of its devices, call it."""
    workload = planned.workload
    net, in_stages = copied(model).train(), racer.staging is not None
    samples = workload.batch if in_stages else racer.placement.batch.num_samples
    examples = [_example(workload, name, samples) for name in workload.graph.inputs]
    take_part(
        net,
        racer.plan,
        tuple(batch[: max(1, samples // racer.plan.parts)] for batch in examples),
        batch_norm=workload.batch_norm,
        seed=0,
        microbatches=racer.passes if in_stages else None,
        recompute=recompute,
    )
    inputs = tuple(batch[local_samples(net, samples)] for batch in examples)
    optimizer = workload.optimizer(list(net.parameters()))

    def go() -> None:
        forward_backward(net, inputs, inputs[0], lambda outputs, _: _mean_square(outputs))

    def measure() -> float:
        ranks.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        with autocast(workload):
            with accumulate(net):
                for _ in range(1, 1 if in_stages else racer.passes):
                    go()
            go()
        optimizer.step()
        if workload.device.type == "cuda":
            torch.cuda.synchronize(workload.device)
        return max(ranks.gather(time.perf_counter() - began))

    return median(steady(measure, float, ranks.broadcast, most=_MOST))


def _example(workload: Workload, name: str, samples: int) -> Tensor:
    shape, dtype = workload.graph.shape(name)[1:], workload.graph.values[name].dtype
    batch = torch.rand(samples, *shape, device=workload.device).to(dtype)
    return batch.contiguous(memory_format=torch.channels_last) if workload.channels_last and len(shape) == 3 else batch


def _mean_square(outputs: object) -> Tensor:
    return torch.stack([output.float().square().mean() for output in leaves(outputs, Tensor)]).sum()
