"""An optimizer whose state is divided over ranks trains and saves as one that is not."""

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from convoy.checkpoint.files import Checkpoint
from convoy.engine.gradients import GradientReducer, ShardedOptimizer, sharded
from convoy.engine.gradients.buckets import pieces_of
from convoy.plans.plan import Plan
from convoy.training.division import divide
from convoy.training.parallel import Method, ParallelNetwork
from convoy.training.state import RunState
from ranks import run_ranks

SAMPLES = 8


def _run(plan: str, worth: int) -> tuple[RunState, bool]:
    """A network under the plan, its optimizer divided if that is worth while from so many bytes on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 5)).double()
    network = ParallelNetwork(
        model,
        Plan.parse(plan),
        torch.zeros(2, 3, 4, 4, dtype=torch.float64),
        batch_norm="sync",
        seed=0,
        method=Method(),
    )
    with patch.object(sharded, "_WORTH", worth):
        optimizer = network.share(AdamW(model.parameters(), lr=0.01))
    state = RunState(network, optimizer, torch.amp.GradScaler("cpu", enabled=False))
    return state, isinstance(optimizer, ShardedOptimizer)


def pack(state: RunState, step: int) -> Checkpoint:
    tensors, values = state.contents({})
    return Checkpoint(step, "run", dict(tensors), values)


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
        network.backward(network.forward(images[update][list(part)]).square().sum().div(SAMPLES), last=True)
        network.finish_update()
        network.clip(0.05)
        state.optimizer.step()


class _Nothing:
    def wait(self) -> None:
        pass


def _keep_old_weights(patch: pytest.MonkeyPatch) -> None:
    """Nobody gets the pieces of the weights, nor of the state, that others have updated."""
    patch.setattr(sharded, "start_gather", lambda elements, group: _Nothing())


def _forget_state(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint's state is not taken over."""
    patch.setattr(ShardedOptimizer, "load_state_dict", lambda self, state: None)


def _take_first_pieces(patch: pytest.MonkeyPatch) -> None:
    """Every rank takes the first rank's piece of the state."""
    load = ShardedOptimizer.load_state_dict

    def wrong(self: ShardedOptimizer, state: dict[str, Any]) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(sharded, "own_piece", lambda elements, group: pieces_of(elements, group)[0])
            load(self, state)

    patch.setattr(ShardedOptimizer, "load_state_dict", wrong)


def _clip_by_own_norm(patch: pytest.MonkeyPatch) -> None:
    """The norm is taken over whatever lies in `.grad`, of which only a piece is a sum."""
    patch.setattr(GradientReducer, "own_gradients", lambda self: {})


SABOTAGES = {each.__name__: each for each in (_keep_old_weights, _forget_state, _take_first_pieces, _clip_by_own_norm)}


def _compare(plan: str, sabotage: str | None = None) -> float:
    whole, divided = _run(plan, 2**60)
    assert not divided
    _train(whole, range(2))
    half = copy.deepcopy(pack(whole, 2))
    _train(whole, range(2, 4))
    with pytest.MonkeyPatch.context() as patch:
        if sabotage is not None:
            SABOTAGES[sabotage](patch)
        return _errors(plan, whole, half)


def _errors(plan: str, whole: RunState, half: Checkpoint) -> float:
    state, divided = _run(plan, 1)
    assert divided
    _train(state, range(2))
    saved = pack(state, 2)
    errors = [_distance(saved.tensors, half.tensors)]
    other, _ = _run(plan, 1)
    other.unpack(half)
    for one in (state, other):
        _train(one, range(2, 4))
        errors.append(_distance(pack(one, 4).tensors, pack(whole, 4).tensors))
    return max(errors)


def _distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max().clamp(min=1e-300)) for name in a)


@pytest.mark.parametrize("plan", ["sample=2", "sample=2,filter=2"])
def test_weights_and_checkpoints_are_those_of_a_whole_optimizer(plan: str) -> None:
    world = 4 if "," in plan else 2
    assert max(run_ranks(_compare, world, plan)) < 1e-10


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_a_broken_optimizer_is_noticed(sabotage: str) -> None:
    assert max(run_ranks(_compare, 2, "sample=2", sabotage)) > 1e-6
