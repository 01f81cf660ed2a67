"""A run says what holds it back: once, after its first hundred updates, and in a file; and is not changed by that."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from convoy.doctor.advice import Advice
from convoy.doctor.diagnosis import WORTH_SAYING, Diagnosis
from convoy.errors import ConvoyError
from convoy.launch.host import HostLoad, HostWatch, OtherProcess
from convoy.training import checkup, evaluate, loop, step
from convoy.training.evaluate import EvaluationTally
from convoy.training.loop import Loop
from convoy.training.step import TrainingStep
from made_time import made_time
from ranks import RankFailed, run_ranks
from tiny import write_mnist
from whole_runs import Ended, train_here

UPDATES = 70
"""After which these runs say it: a hundred take longer."""
LENGTH = UPDATES + 40
SETTINGS = {
    "epochs": f"{LENGTH}ba",
    "log_every": "50ba",
    "evaluate_every": f"{UPDATES}ba",
    "batch_norm": "microbatch",
    "checkpoint.every": f"{UPDATES + 20}ba",
}
LOOKS_CLOSER = "looks closer"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("diagnosis") / "data")


def trained(data: Path, out: Path, settings: dict[str, str] | None = None, resume: bool = False) -> Ended:
    with patch.object(loop, "UPDATES", UPDATES):
        return train_here(data, out, SETTINGS | (settings or {}), resume)


@contextlib.contextmanager
def looked_at(gain: float | None) -> Iterator[list[tuple[int, bool, bool]]]:
    """When runs are diagnosed: updates done, at the end, and whether there is a file then; with an advice's gain."""
    calls = list[tuple[int, bool, bool]]()
    own, of = Loop._diagnose, Diagnosis.of

    def diagnose(self: Loop, at_end: bool = False) -> None:
        own(self, at_end)
        calls.append((self.done, at_end, self.run.diagnosis.is_file()))

    def advised(facts: Any, updates: tuple[int, int]) -> Diagnosis:
        found = of(facts, updates)
        advice = () if gain is None else (Advice("batch", "--batch 48", ("--batch", "48"), gain, "It is small."),)
        return Diagnosis(**{**vars(found), "sentence": "It is small.", "advice": advice})

    with patch.object(Loop, "_diagnose", diagnose), patch.object(Diagnosis, "of", staticmethod(advised)):
        yield calls


def run(
    data: Path, out: Path, gain: float | None, settings: dict[str, str]
) -> tuple[Ended, list[tuple[int, bool, bool]]]:
    with looked_at(gain) as calls:
        return trained(data, out, settings), calls


def plain(data: Path, out: Path, settings: dict[str, str]) -> Ended:
    with patch.object(Loop, "_diagnose", lambda self, at_end=False: None):
        return trained(data, out, settings)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_it_is_said_once_and_changes_nothing(data: Path, tmp_path: Path, world: int) -> None:
    found = run_ranks(run, world, data, tmp_path / "run", WORTH_SAYING + 0.01, {})
    assert all([call[:2] for call in calls] == [(UPDATES, False), (LENGTH, True)] for _, calls in found)
    ended, calls = found[0]
    assert all(is_there for *_, is_there in calls)
    said = [sentence for sentence in set(ended.said) if LOOKS_CLOSER in sentence]
    assert said == [
        f"In updates 6 to {UPDATES}: It is small. "
        "What would help most: --batch 48: 1.16 × as many samples a second (predicted). "
        f"convoy doctor {tmp_path / 'run'} looks closer"
    ]
    assert ended.said.count(said[0]) == 2  # as it is said, and among the notes that stay
    without = run_ranks(plain, world, data, tmp_path / "plain", {})[0]
    assert without.digest == ended.digest
    assert not (tmp_path / "plain" / "diagnosis.json").exists()
    other = run_ranks(plain, world, data, tmp_path / "other", {"optimizer.lr": "0.0501"})[0]  # the negative control
    assert other.digest != ended.digest


@pytest.mark.parametrize("gain", [None, WORTH_SAYING - 0.01])
def test_little_is_not_said(data: Path, tmp_path: Path, gain: float | None) -> None:
    ((ended, calls),) = run_ranks(run, 1, data, tmp_path / "run", gain, {})
    assert len(calls) == 2 and not [sentence for sentence in ended.said if LOOKS_CLOSER in sentence]
    found = Diagnosis.from_document(json.loads((tmp_path / "run" / "diagnosis.json").read_text()))
    assert [one.gain for one in found.advice] == ([] if gain is None else [gain])


def evaluating(data: Path, out: Path) -> Ended:
    """An update takes a tenth of a second, and so does each batch of an evaluation after every second update."""
    with made_time(checkup, evaluate, step) as clock:
        update, batch = (clock.before(work, lambda: 0.1) for work in (TrainingStep.__call__, EvaluationTally.add))
        with patch.object(TrainingStep, "__call__", update), patch.object(EvaluationTally, "add", batch):
            return trained(data, out, {"evaluate_every": "2ba"})


def test_evaluations_that_come_too_often_are_found(data: Path, tmp_path: Path) -> None:
    (ended,) = run_ranks(evaluating, 1, data, tmp_path / "run")
    found = Diagnosis.from_document(json.loads((tmp_path / "run" / "diagnosis.json").read_text()))
    (advice,) = [one for one in found.advice if one.cause == "evaluation"]
    assert advice.gain > 1.5 and advice.arguments[0] == "--set"
    assert found.images_per_s > 0 and found.batch == 24 and found.devices == 1 and found.parts["forward"] > 0
    assert len([sentence for sentence in set(ended.said) if LOOKS_CLOSER in sentence]) == 1


def beside_others(data: Path, out: Path) -> Ended:
    """An update takes a second, and whoever is busy beside the run is named after the updates that are done by then."""
    updates, update = itertools.count(1), TrainingStep.__call__
    done = [0]

    def count(step: TrainingStep, *args: Any) -> Any:
        done[0] = next(updates)
        clock.sleep(1.0)
        return update(step, *args)

    def read(watch: HostWatch) -> HostLoad:
        process = OtherProcess(f"until {done[0]}", 1, 1.0)
        return HostLoad(100.0, 50.0, 1.0, 90.0, None, (process,), 0.9, 0.0, 0, None, None, None)

    with (
        made_time(checkup) as clock,
        patch.object(HostWatch, "read", read),
        patch.object(TrainingStep, "__call__", count),
    ):
        return trained(data, out)


def test_at_the_end_the_host_is_that_of_the_last_updates(data: Path, tmp_path: Path) -> None:
    (ended,) = run_ranks(beside_others, 1, data, tmp_path / "run")
    assert any(f"wait for until {UPDATES} (process 1) to end" in sentence for sentence in ended.said)
    found = Diagnosis.from_document(json.loads((tmp_path / "run" / "diagnosis.json").read_text()))
    assert f"wait for until {LENGTH} (process 1) to end" in [one.change.partition(",")[0] for one in found.advice]


def test_a_run_of_a_few_updates_is_not_diagnosed(data: Path, tmp_path: Path) -> None:
    run_ranks(trained, 1, data, tmp_path / "run", {"epochs": "8ba", "checkpoint.every": "8ba"})
    assert not (tmp_path / "run" / "diagnosis.json").exists()
    run_ranks(trained, 1, data, tmp_path / "longer", {"epochs": "40ba", "checkpoint.every": "40ba"})
    assert (tmp_path / "longer" / "diagnosis.json").is_file()


def on_a_full_disk(data: Path, out: Path) -> Ended:
    own = loop.write_json

    def write(path: Path, document: Any) -> None:
        if path.name == "diagnosis.json":
            raise OSError(28, "No space left on device")
        own(path, document)

    with patch.object(loop, "write_json", write):
        return trained(data, out)


def test_a_full_disk_does_not_end_a_run(data: Path, tmp_path: Path) -> None:
    (ended,) = run_ranks(on_a_full_disk, 1, data, tmp_path / "run")
    assert ended.digest and not (tmp_path / "run" / "diagnosis.json").exists()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


def without_a_diagnosis(data: Path, out: Path) -> Ended:
    with patch.object(Diagnosis, "of", side_effect=ZeroDivisionError("division by zero")):
        return trained(data, out)


def test_what_cannot_be_diagnosed_does_not_end_a_run(data: Path, tmp_path: Path) -> None:
    ended = run_ranks(without_a_diagnosis, 2, data, tmp_path / "run")[0]
    assert any("is not known (ZeroDivisionError: division by zero)" in sentence for sentence in ended.said)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


def broken_off(data: Path, out: Path) -> None:
    own = Loop._after_update

    def fail(self: Loop) -> None:
        own(self)
        if self.done == UPDATES + 25:
            raise ConvoyError("the power is off")

    with patch.object(Loop, "_after_update", fail):
        trained(data, out)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_resumes_is_diagnosed_anew(data: Path, tmp_path: Path, world: int) -> None:
    out = tmp_path / "run"
    with pytest.raises(RankFailed, match="the power is off"):
        run_ranks(broken_off, world, data, out)
    before = (out / "diagnosis.json").read_text()
    (out / "diagnosis.json").write_text("{")  # as if it had been cut off
    ended = run_ranks(trained, world, data, out, {}, True)[0]
    assert ended.digest == run_ranks(trained, world, data, tmp_path / "whole", {})[0].digest
    again = Diagnosis.from_document(json.loads((out / "diagnosis.json").read_text()))
    assert again.model == Diagnosis.from_document(json.loads(before)).model == "tiny:TinyNet"
