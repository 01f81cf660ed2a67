"""An optimiser whose state is divided over ranks trains and saves as one that is not."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from convoy.engine.gradients import ShardedOptimizer, sharded
from convoy.plans.plan import Plan
from convoy.training.division import divide
from convoy.training.state import RunState
from convoy.training.under_plan import Method, UnderPlan
from ranks import run_ranks

SAMPLES = 8


def _run(plan: str, worth: int) -> tuple[RunState, bool]:
    """A network under the plan, its optimiser divided if that is worth while from so many bytes on."""
    sharded._WORTH = worth
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 5)).double()
    network = UnderPlan(
        model,
        Plan.parse(plan),
        torch.zeros(2, 3, 4, 4, dtype=torch.float64),
        batch_norm="sync",
        seed=0,
        method=Method(),
    )
    optimizer = network.share(AdamW(model.parameters(), lr=0.01))
    state = RunState(network, optimizer, torch.amp.GradScaler("cpu", enabled=False))
    return state, isinstance(optimizer, ShardedOptimizer)


def _train(state: RunState, updates: range) -> None:
    network = state.network
    division = divide((2,) * 4, network.engine.num_sample_ranks)
    (piece,) = division.passes(4)
    network.divide(division, 1)
    images = torch.randn(10, SAMPLES, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for update in updates:
        state.optimizer.zero_grad()
        network.enter(update, piece)
        part = piece.parts[network.engine.sample_rank]
        network.forward(images[update][list(part)]).square().sum().div(SAMPLES).backward()
        network.passed()
        network.finish_update()
        network.clip(0.05)
        state.optimizer.step()


def _compare(plan: str) -> float:
    whole, divided = _run(plan, 2**60)
    assert not divided
    _train(whole, range(2))
    half = copy.deepcopy(whole.pack(2, "run", {}))
    _train(whole, range(2, 4))
    state, divided = _run(plan, 1)
    assert divided
    _train(state, range(2))
    saved = state.pack(2, "run", {})
    errors = [_distance(saved.tensors, half.tensors)]
    other, _ = _run(plan, 1)
    other.unpack(half)
    for one in (state, other):
        _train(one, range(2, 4))
        errors.append(_distance(one.pack(4, "run", {}).tensors, whole.pack(4, "run", {}).tensors))
    return max(errors)


def _distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max().clamp(min=1e-300)) for name in a)


@pytest.mark.parametrize("plan", ["sample=2", "sample=2,filter=2"])
def test_weights_and_checkpoints_are_those_of_a_whole_optimiser(plan: str) -> None:
    world = 4 if "," in plan else 2
    assert max(run_ranks(_compare, world, plan)) < 1e-10
