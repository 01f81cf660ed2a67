"""A signal during an evaluation: it is broken off, and done anew, so that nothing shows of it."""

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from torch import Tensor

from convoy.checkpoint.store import CheckpointStore
from convoy.data import Batch
from convoy.progress import Reporter
from convoy.training import load_recipe, train
from convoy.training.environment import join_ranks
from convoy.training.evaluate import EvaluationTally
from convoy.training.session import Session
from ranks import run_ranks
from tiny import NUM_TEST, write_mnist
from whole_runs import BASE, as_before

SETTINGS = {"epochs": "6ba", "evaluate_every": "2ba", "checkpoint.every": "100ba", "reproducible": "true"}


def train_until(data: Path, out: Path, stop_at: int | None) -> tuple[str | None, int, int]:
    """Train, with a signal to the last rank in the batch `stop_at` of all evaluations.

    Returns:
        The signal, the updates done, and batches that were evaluated.
    """
    ranks, device = join_ranks()
    values = BASE | SETTINGS | {"data.path": str(data), "parallel.devices": str(ranks.num)}
    add, count = EvaluationTally.add, 0

    def counted(self: EvaluationTally, batch: Batch, logits: Tensor) -> None:
        nonlocal count
        count += 1
        if count == stop_at and ranks.rank == ranks.num - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        add(self, batch, logits)

    with as_before() as patch:
        patch.setattr(EvaluationTally, "add", counted)
        patch.setattr(Session, "evaluation_batch", lambda self: 5)
        recipe = load_recipe("default", [f"{key}={value}" for key, value in values.items()])
        found = train(recipe, out, resume=True, device=device, ranks=ranks, reporter=Reporter())
    return found.signal, found.steps, count


def left(out: Path) -> tuple[list[list[object]], str]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    weights = out / "weights.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else ""
    return [[line.get(key) for key in ("split", "step", "loss", "top1", "lr")] for line in lines], digest


@pytest.mark.parametrize("num", [1, 2])
def test_an_evaluation_that_a_signal_breaks_off_is_done_anew(tmp_path: Path, num: int) -> None:
    data, whole, parts = write_mnist(tmp_path / "data"), tmp_path / "whole", tmp_path / "parts"
    each = NUM_TEST // 5 // num
    assert run_ranks(train_until, num, data, whole, None) == [(None, 6, 3 * each)] * num
    stages = [(1, 2), (1, 2), (each + 1, 4), (each + 1, 6), (1, 6)]  # broken off once more when it is done anew
    for stop_at, steps in stages:
        for name, done, count in run_ranks(train_until, num, data, parts, stop_at):
            assert (name, done) == ("SIGTERM", steps)
            assert stop_at <= count < stop_at + each - 1
        lines, digest = left(parts)
        assert ["test", steps] not in [line[:2] for line in lines] and not digest
    assert run_ranks(train_until, num, data, parts, None) == [(None, 6, each)] * num
    assert left(parts) == left(whole)


def test_without_the_note_in_the_checkpoint_it_would_be_missing(tmp_path: Path) -> None:
    data, out = write_mnist(tmp_path / "data"), tmp_path / "run"
    assert run_ranks(train_until, 1, data, out, 1)[0][:2] == ("SIGTERM", 2)
    store = CheckpointStore(out / "checkpoints")
    checkpoint = store.load(2)
    assert checkpoint.values["loop"]["progress"]["to_evaluate"] is True
    checkpoint.values["loop"]["progress"]["to_evaluate"] = False
    store.save(checkpoint)
    run_ranks(train_until, 1, data, out, None)
    assert [line[1] for line in left(out)[0] if line[0] == "test"] == [4, 6]


def test_a_run_that_crashes_after_it_has_one_line_of_it(tmp_path: Path) -> None:
    data, out = write_mnist(tmp_path / "data"), tmp_path / "run"
    run_ranks(train_until, 1, data, out, 1)
    run_ranks(train_until, 1, data, out, NUM_TEST // 5 + 1)  # done anew, written, and broken off at the next one
    shutil.rmtree(CheckpointStore(out / "checkpoints").place(4))
    run_ranks(train_until, 1, data, out, None)
    assert [line[1] for line in left(out)[0] if line[0] == "test"] == [2, 4, 6]
