"""Updates recorded and replayed give the bits of updates that run, and say so; what cannot be replayed is named."""

from contextlib import closing, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

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
                session.train_in(update, step.recorded)
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


def test_growing_pictures_and_layers_that_thaw_are_recorded_anew_with_the_same_bits(data: Path) -> None:
    growing = ("model.name=tiny:TinyResidual", "data.augment.crop=random-resized", "data.workers=0")
    growing += ("data.progressive={from_size: 16, begin: 0, end: 1}",)  # an epoch has six updates
    thawing = ("model.name=tiny:TinyResidual", "optimizer.freeze=['block:10ba']")
    for alike, said in run_ranks(both, 1, data, [growing, thawing], ReplayedGraph)[0]:
        assert alike and len(said) == 2 and all("has the same bits" in sentence for sentence in said), said
