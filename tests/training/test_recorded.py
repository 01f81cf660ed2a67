"""Updates recorded and replayed give the bits of updates that run, and say so; what cannot be replayed is named."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from convoy.engine.recorded import Recorded
from convoy.ops.context import StepContext
from ranks import run_ranks
from replayed import ReplayedGraph, recording
from training.scenarios import session as session_of

Bits = tuple[dict[str, Tensor], list[float], list[str]]
ALL = ("ema={decay: 0.9}", "clip_norm=0.5", "epochs=20ba", "microbatch=4")


def train(data: Path, record: type[ReplayedGraph] | None, *settings: str) -> Bits:
    """Weights and buffers, and EMA's, after twenty updates; their losses; what was said of recording."""
    with recording(record) if record else nullcontext():
        session = session_of(data, *ALL, *settings)
        step, said, losses = session.step(), list[str](), list[float]()
        step.records = True
        if record:
            assert step.recorded is not None
            step.recorded.tell = said.append
        session.model.train()
        with closing(session.batches(0, 20)) as batches:
            for update, batch in enumerate(batches):
                losses.append(float(sum(step(batch, update).losses)))
        state = {name: x.clone() for name, x in session.model.state_dict().items()}
        state |= {f"average of {n}": x.clone() for n, x in session.state.contents({})[0] if "average" in n}
        return state, losses, said


def both(data: Path, cases: list[tuple[str, ...]], graph: type[ReplayedGraph]) -> list[tuple[bool, list[str]]]:
    """Whether bits are the same, and what was said, for each of some settings."""
    found = []
    for settings in cases:
        eager, replayed = (train(data, record, *settings) for record in (None, graph))
        alike = eager[1] == replayed[1] and all(torch.equal(x, replayed[0][name]) for name, x in eager[0].items())
        found.append((alike, replayed[2]))
    return found


CASES = {
    "serial": ["batch_norm=microbatch", "batch_norm=sync", "precision=fp16"],
    "sample=2": ["batch_norm=microbatch", "batch_norm=local"],
    "filter=2": ["batch_norm=sync"],
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", CASES)
def test_replayed_updates_have_the_bits_of_updates_that_run(data: Path, plan: str) -> None:
    """Other pictures, labels, random keys and learning rates in each; dropout, EMA, clipping, the scale of fp16."""
    cases = [(f"parallel.plan={plan}", case) for case in CASES[plan]]
    for found in run_ranks(both, 1 if plan == "serial" else 2, data, cases, ReplayedGraph):
        for alike, (sentence,) in found:
            assert alike and sentence.startswith("updates are replayed as a CUDA graph"), sentence
            assert "has the same bits" in sentence


def test_growing_pictures_are_recorded_anew_with_the_same_bits(data: Path) -> None:
    growing = ("model.name=tiny:TinyResidual", "data.augment.crop=random-resized", "data.workers=0")
    growing += ("data.progressive={from_size: 16, begin: 0, end: 1}",)  # an epoch has six updates
    ((alike, said),) = run_ranks(both, 1, data, [growing], ReplayedGraph)[0]
    assert alike and len(said) == 2 and all("has the same bits" in sentence for sentence in said), said


class Forgetful:
    """Keeps nothing alive, as a CUDA graph does not; what it recorded has run already."""

    def record(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        return work()

    def replay(self) -> None:
        pass


def test_a_recording_keeps_what_it_reads_until_it_is_forgotten() -> None:
    constants, runs, net = [torch.ones(3)], list[int](), nn.Linear(3, 1)

    def function(step: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        runs.append(step)
        loss = net(inputs[0] * constants[0]).sum()
        loss.backward()
        return [loss.detach()]

    recorded = Recorded(function, net, StepContext(), Forgetful, tell=str)
    for step in range(6):
        net.zero_grad()
        recorded(step, [torch.ones(2, 3)])
    assert recorded.is_recorded and runs == [0, 1, 2, 3, 4, 4, 3]
    constant = weakref.ref(constants.pop())
    assert constant() is not None
    recorded.forget()
    assert constant() is None
