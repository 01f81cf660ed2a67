"""A run that fails says why in its summary, and goes on from there."""

import errno
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from convoy.checkpoint.store import CheckpointStore
from convoy.data import Batch
from convoy.errors import ConvoyError
from convoy.training import RunDirectory, load_recipe, train
from convoy.training.loop import Loop
from convoy.training.step import StepResult, TrainingStep
from convoy.training.summary import Witness, briefly
from tiny import write_mnist
from whole_runs import BASE, Words, as_before

SETTINGS = ("epochs=8ba", "checkpoint.every=2ba", "reproducible=true")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_mnist(tmp_path / "data")


def run(data: Path, out: Path, settings: Sequence[str] = SETTINGS, fails: BaseException | None = None) -> list[str]:
    """Train, with an error in the update after the fifth."""
    said = dict(setting.split("=", 1) for setting in settings)
    values = [f"{key}={value}" for key, value in (BASE | {"data.path": str(data)} | said).items()]
    step, words = TrainingStep.__call__, Words()

    def failing(self: TrainingStep, batch: Batch, update: int) -> StepResult:
        if update == 5 and fails is not None:
            raise fails
        return step(self, batch, update)

    with as_before() as patch:
        patch.setattr(TrainingStep, "__call__", failing)
        train(
            load_recipe("default", values),
            out,
            resume=RunDirectory(out).is_run(),
            device=torch.device("cpu"),
            reporter=words,
        )
    return words.said


def stands(out: Path) -> tuple[Any, Any, Any]:
    found = json.loads((out / "summary.json").read_text())
    return found["status"], found["error"], found["steps"]


def digest(out: Path) -> str:
    return hashlib.sha256((out / "weights.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("the odd key"), "KeyError: 'the odd key'"),
        (ConvoyError("7.png cannot be read: mend it"), "7.png cannot be read: mend it"),
        (RuntimeError("first line\nsecond line"), "RuntimeError: first line"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_an_error_is_in_the_summary_and_the_run_goes_on(
    data: Path, tmp_path: Path, error: BaseException, said: str
) -> None:
    run(data, tmp_path / "whole")
    out = tmp_path / "run"
    with pytest.raises(type(error)) as caught:
        run(data, out, fails=error)
    assert caught.value is error
    status, sentence, step = stands(out)
    assert (status, step) == ("failed", 5)
    place = r" \(test_failure_notes\.py, line \d+, in failing\)"  # where the error lies, but for a user's mistake
    assert sentence is not None and re.fullmatch(f"{re.escape(said)}({place})?", sentence)
    assert ("in failing" in sentence) == isinstance(error, KeyError | RuntimeError)
    # The checkpoint after 4 updates may still have been on its way.
    assert {f"going on after {done} of 8 updates" for done in (2, 4)} & set(run(data, out))
    assert stands(out) == ("finished", None, 8)
    assert digest(out) == digest(tmp_path / "whole")


def test_a_full_disk_is_in_the_summary_as_it_is_printed(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConvoyError, match=r"No space left on device.*go on with --resume") as caught:
        run(data, tmp_path / "run", fails=OSError(errno.ENOSPC, "No space left on device"))
    assert stands(tmp_path / "run") == ("failed", str(caught.value), 5)


def test_a_run_that_cannot_go_on_says_why(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Loop) -> None:
        raise RuntimeError("odd tensors")

    with pytest.raises(ConvoyError, match="odd"):  # for which a checkpoint that is being written is awaited
        run(data, tmp_path / "run", fails=ConvoyError("odd"))
    monkeypatch.setattr(Loop, "resume", fail)
    with pytest.raises(RuntimeError, match="odd tensors"):
        run(data, tmp_path / "run")
    status, sentence, step = stands(tmp_path / "run")
    assert (status, step) == ("failed", 5) and str(sentence).startswith(
        "RuntimeError: odd tensors (test_failure_notes.py"
    )


def test_a_run_that_failed_before_its_first_checkpoint_says_that_it_begins_anew(data: Path, tmp_path: Path) -> None:
    settings = ["epochs=8ba", "checkpoint.every=7ba", "evaluate_every=8ba"]
    with pytest.raises(KeyError):
        run(data, tmp_path / "run", settings, KeyError("odd"))
    assert "going on after 0 of 8 updates: no checkpoint was written before" in run(data, tmp_path / "run", settings)
    assert stands(tmp_path / "run") == ("finished", None, 8)


def test_a_picture_that_cannot_be_read_is_in_the_summary(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    pixels = torch.Generator().manual_seed(0)
    for label in ("cat", "dog"):
        (photos / label).mkdir(parents=True)
        for number in range(20):
            array = torch.randint(0, 255, (28, 28 + number), generator=pixels, dtype=torch.uint8).numpy()
            Image.fromarray(array).save(photos / label / f"{number:02d}.png")
    odd = photos / "cat" / "03.png"
    odd.write_bytes(odd.read_bytes()[:60])
    settings = ["epochs=20ba", "batch=8", "data.channels=1", "data.image_size=28", "data.workers=0"]
    with pytest.raises(ConvoyError, match=r"03\.png") as caught:
        run(photos, tmp_path / "run", settings)
    assert stands(tmp_path / "run")[:2] == ("failed", str(caught.value))


def test_of_a_loss_that_is_no_number_the_last_sentence_stays(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConvoyError, match="the loss is nan in update 2, first in") as caught:
        run(data, tmp_path / "run", ["optimizer.lr=1e30", "schedule.warmup=0ba", "epochs=4ba"])
    assert stands(tmp_path / "run")[:2] == ("failed", str(caught.value))


@pytest.mark.parametrize("finished", [False, True])
def test_checkpoints_that_are_all_damaged_are_in_the_summary(data: Path, tmp_path: Path, finished: bool) -> None:
    out = tmp_path / "run"
    if finished:
        run(data, out)
    else:
        with pytest.raises(ConvoyError, match="odd"):  # for which a checkpoint that is being written is awaited
            run(data, out, fails=ConvoyError("odd"))
    store = CheckpointStore(out / "checkpoints")
    assert store.steps()
    for step in store.steps():
        shutil.rmtree(store.place(step) / "state")
    with pytest.raises(ConvoyError, match="can be used"):
        run(data, out)
    status, error, _ = stands(out)
    assert (status, error is None) == (("finished", True) if finished else ("failed", False))
    assert finished or "can be used" in error


def test_who_looks_on_notes_what_killed_ranks_cannot(tmp_path: Path) -> None:
    out = RunDirectory(tmp_path)
    out.summary_file.write_text('{"status": "running", "error": null, "steps": 3}')
    witness = Witness(out)
    witness.note("rank 0 failed: it was killed")  # before they have begun
    assert stands(tmp_path) == ("running", None, 3)
    (tmp_path / "new").write_text('{"status": "running", "error": null, "steps": 7}')
    (tmp_path / "new").replace(out.summary_file)
    with out.lock():
        witness.note("rank 0 failed: it was killed")  # another process goes on already
    assert stands(tmp_path) == ("running", None, 7)
    witness.note("rank 0 failed: it was killed")
    assert stands(tmp_path) == ("failed", "rank 0 failed: it was killed", 7)


@pytest.mark.parametrize("status", ["stopped", "finished"])
def test_ranks_that_fail_after_all_is_saved_do_not_make_it_a_failure(tmp_path: Path, status: str) -> None:
    out = RunDirectory(tmp_path)
    witness = Witness(out)
    out.summary_file.write_text(json.dumps({"status": status, "error": None, "steps": 7}))
    witness.note("rank 1 failed: it was killed")
    assert stands(tmp_path) == (status, None, 7)


def test_what_cannot_be_written_does_not_keep_the_run_from_its_end() -> None:
    never = threading.Event()
    briefly(never.wait, 0.05)  # type: ignore[arg-type]

    def fail() -> None:
        raise RuntimeError("changed while it was written")

    briefly(fail)
    never.set()
