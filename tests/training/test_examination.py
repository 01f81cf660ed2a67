"""A minute of a training: what is measured of it, on one device and on two, without a file that stays."""

import os
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from convoy.doctor.advice import Diagnosis
from convoy.doctor.facts import Facts
from convoy.errors import ConvoyError
from convoy.training import examination
from convoy.training.checkpoints import Saver
from convoy.training.examination import examine
from ranks import run_ranks
from tiny import write_mnist, write_pictures
from training.examined import cores_as_before, session

EACH = ("checkpoint.every=1ba",)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("examined") / "data")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("photos") / "data", size=(100, 75))


def refuse(*args: Any, **options: Any) -> Any:
    raise PermissionError(13, "Permission denied")


def break_off(*args: Any, **options: Any) -> Any:
    raise ConvoyError("the checkpoint could not be written")


BROKEN: dict[str, AbstractContextManager[Any]] = {
    "": nullcontext(),
    "folder": patch.object(tempfile, "TemporaryDirectory", refuse),
    "save": patch.object(Saver, "save", break_off),
}


def examined(data: Path, folder: Path, settings: tuple[str, ...], seconds: float, broken: str) -> tuple[Facts, Any]:
    os.chdir(folder)
    found, said = session(data, *settings), list[str]()
    with cores_as_before(), BROKEN[broken]:
        facts = examine(found, seconds=seconds, say=lambda what, *_: said.append(what), folder=folder / "runs" / "x")
    return facts, list(dict.fromkeys(said))


def test_one_device(data: Path, tmp_path: Path) -> None:
    ((facts, said),) = run_ranks(examined, 1, data, tmp_path, EACH, 0.0, "")
    assert facts.pictures is not None and facts.pictures.in_memory
    assert facts.evaluation_s is not None and 0 < facts.evaluation_s < 2
    assert facts.checkpoint_s is not None and 0 < facts.checkpoint_s < 1
    assert facts.checkpoint_every == 1
    assert facts.compute_s is not None and 0 < facts.compute_s <= facts.update_s
    assert facts.trials == () and facts.hosts == ()
    assert said[:3] == ["timing updates", "timing pictures", "timing an evaluation"]
    assert Diagnosis.of(facts).advice[0].cause in ("checkpoint", "busy", "evaluation")
    assert not list(tmp_path.iterdir())


def test_two_devices_know_the_same(data: Path, tmp_path: Path) -> None:
    (facts, _), (other, _) = run_ranks(examined, 2, data, tmp_path, EACH, 1.0, "")
    assert facts == other
    assert facts.devices == len(facts.ranks) == 2 and facts.plan == "sample=2"
    assert facts.link_bits_per_s is not None and facts.link_bits_per_s > 1e6 and len(facts.hosts) == 1
    assert facts.checkpoint_s is not None
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("parallel.plan=stage=2",),
        ("parallel.plan=filter=2",),
        ("parallel.shares=[3,1]", "batch=32"),
        ("parallel.shares=auto", "batch=32"),
        ("parallel.local_sgd=2",),
        ("reproducible=true", "ema.decay=0.9"),
        ("parallel.plan=auto",),
    ],
)
def test_trainings_of_other_kinds(data: Path, tmp_path: Path, settings: tuple[str, ...]) -> None:
    (facts, _), (other, _) = run_ranks(examined, 2, data, tmp_path, (*settings, *EACH), 8.0, "")
    assert facts == other
    assert facts.trials and facts.compute_s and facts.evaluation_s and facts.pictures
    found = Diagnosis.of(facts)
    assert found.text().count("\n") >= 1 and Diagnosis.from_document(found.to_document()) == found


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("broken", ["folder", "save"])
def test_without_a_place_for_checkpoints_they_are_left_out(data: Path, tmp_path: Path, world: int, broken: str) -> None:
    for facts, _ in run_ranks(examined, world, data, tmp_path, EACH, 0.0, broken):
        assert facts.checkpoint_s is None and facts.evaluation_s is not None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("every", ["auto", "100000ba"])
def test_checkpoints_that_cost_nothing_are_not_tried(data: Path, tmp_path: Path, every: str) -> None:
    ((facts, said),) = run_ranks(examined, 1, data, tmp_path, (f"checkpoint.every={every}",), 0.0, "")
    assert facts.checkpoint_s is None and "timing checkpoints" not in said


@pytest.mark.parametrize(("batch", "world"), [("1", 1), ("4", 1), ("2", 2)])
def test_small_batches(photos: Path, tmp_path: Path, batch: str, world: int) -> None:
    settings = (f"batch={batch}", "microbatch=1", "data.image_size=28", "data.workers=0")
    facts, _ = run_ranks(examined, world, photos, tmp_path, settings, 0.0, "")[0]
    assert facts.pictures is not None and 0 < facts.pictures.cpu_s < 1
    assert 0 <= facts.pictures.read_s < 1 and 0 < facts.update_s < 1
    assert Diagnosis.from_document(Diagnosis.of(facts).to_document()) == Diagnosis.of(facts)


def both_evaluations(data: Path, folder: Path) -> tuple[float, float]:
    """Seconds of an evaluation as it follows from its first batches, and of all of them."""
    found = session(data, "batch=2", "microbatch=1")
    examination._evaluation_s(found)  # what is first
    with patch.object(examination, "_TEST_BATCHES", 10**6):
        whole = examination._evaluation_s(found)
    asked = list[bool]()
    own = found.evaluate

    def evaluate(stop: Any) -> Any:
        return own(lambda: asked.append(stop()) or asked[-1])

    with patch.object(type(found), "evaluate", lambda self, stop: evaluate(stop)):
        part = examination._evaluation_s(found)
    assert True in asked and len(asked) < 10
    return part, whole


def test_an_evaluation_follows_from_its_first_batches(tmp_path: Path) -> None:
    data = write_mnist(tmp_path / "data", num_test=600)
    for part, whole in run_ranks(both_evaluations, 2, data, tmp_path):
        assert part == pytest.approx(whole, rel=0.6)
