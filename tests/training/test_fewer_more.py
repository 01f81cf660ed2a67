"""Ranks that get fewer and more during one run, each time after a crash between two checkpoints."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from convoy.ops.postponed import PostponedGradients
from convoy.plans.plan import Plan
from convoy.training import RunDirectory, loop
from ranks import run_ranks
from tiny import write_mnist
from whole_runs import Ended, as_before, train_here

SETTINGS = {"epochs": "16ba", "checkpoint.every": "2ba", "evaluate_every": "5ba"}
STAGES = ((4, 5), (3, 8), (2, 13), (4, None))
"""Ranks, and the updates after which they end without a word."""


class Crashed(Exception):  # noqa: N818
    """The ranks are gone."""


@contextmanager
def crash(after: int | None) -> Iterator[None]:
    with as_before() as patch:
        log = loop.Loop._end_window

        def logged(self: loop.Loop) -> None:
            log(self)
            if self.done == after:
                raise Crashed

        patch.setattr(loop.Loop, "_end_window", logged)
        yield


def stage(data: Path, out: Path, settings: dict[str, str], after: int | None) -> Ended | None:
    try:
        with crash(after):
            return train_here(data, out, settings, resume=True)
    except Crashed:
        return None


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("fewer") / "data")


@pytest.mark.slow
@pytest.mark.parametrize("reproducible", ["true", "false"])
def test_four_three_two_four(data: Path, tmp_path: Path, reproducible: str) -> None:
    settings = SETTINGS | {"reproducible": reproducible}
    (serial,) = run_ranks(train_here, 1, data, tmp_path / "serial", settings)
    for ranks, after in STAGES:
        found = run_ranks(stage, ranks, data, tmp_path / "run", settings, after)
    ended = found[0]
    assert ended is not None
    going_on = re.match(r"going on after (\d+) of 16 updates", ended.said[0])
    assert going_on is not None
    assert 8 <= int(going_on[1]) <= 12  # the checkpoint on its way when the ranks were gone may be lost
    if reproducible == "true":
        assert (ended.digest, ended.curve) == (serial.digest, serial.curve)
        return
    assert ended.curve == pytest.approx(serial.curve, rel=1e-4)
    want, have = (load_file(tmp_path / name / "weights.safetensors") for name in ("serial", "run"))
    for name, tensor in want.items():
        torch.testing.assert_close(have[name], tensor, rtol=1e-3, atol=1e-4)


def test_stages_come_and_go(data: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"reproducible": "true"}
    (serial,) = run_ranks(train_here, 1, data, tmp_path / "serial", settings)
    for plan, ranks, after in (
        ("stage=2,sample=2", 4, 5),
        ("sample=2", 2, 8),
        ("stage=3", 3, 11),
        ("stage=2", 2, None),
    ):
        found = run_ranks(stage, ranks, data, tmp_path / "run", settings | {"parallel.plan": plan}, after)
    ended = found[0]
    assert ended is not None
    assert (ended.digest, ended.curve) == (serial.digest, serial.curve)
    plan, summary = RunDirectory(tmp_path / "run").plan, RunDirectory(tmp_path / "run").summary()
    (begins,) = Plan.parse(plan).stages[1:]
    assert [one["layer"] for one in summary["stages"]] == [summary["stages"][0]["layer"], begins]
    assert any(f", stage 2 from {begins}; " in note and "1f1b, stages wait about" in note for note in summary["notes"])
    assert any((one["name"], one["value"]) == ("schedule", "1f1b") for one in summary["derived"])


@pytest.mark.parametrize(
    "optimizer", ["lamb", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lars", "adamw"))]
)
def test_optimizers_see_whole_tensors_of_other_stages(data: Path, tmp_path: Path, optimizer: str) -> None:
    settings = {"epochs": "4ba", "optimizer.name": optimizer, "optimizer.lr": "0.01", "ema.decay": "0.9"}
    settings |= {"reproducible": "true"}
    (serial,) = run_ranks(train_here, 1, data, tmp_path / "serial", settings)
    found = run_ranks(train_here, 4, data, tmp_path / "run", settings | {"parallel.plan": "stage=2,sample=2"})[0]
    assert (found.digest, found.curve) == (serial.digest, serial.curve)


def _without_weights_of_the_last_pass(*given: Any) -> Ended:
    with as_before() as patch:
        compute = PostponedGradients.compute
        patch.setattr(PostponedGradients, "compute", lambda self, last: compute(self, min(last, 2)))
        return train_here(*given)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["stage=2", "stage=2,sample=2"])
def test_zero_bubble_trains_as_one_device_does(data: Path, tmp_path: Path, plan: str) -> None:
    settings = {"epochs": "6ba", "clip_norm": "1"}
    (serial,) = run_ranks(train_here, 1, data, tmp_path / "serial", settings)
    settings |= {"parallel.plan": plan, "parallel.schedule": "zero-bubble"}
    ranks = Plan.parse(plan).mesh.num_devices
    for found in run_ranks(train_here, ranks, data, tmp_path / "run", settings):
        assert found.curve == pytest.approx(serial.curve, rel=1e-5)
    assert any("zero-bubble, stages wait about" in note for note in RunDirectory(tmp_path / "run").summary()["notes"])
    (wrong, *_) = run_ranks(_without_weights_of_the_last_pass, ranks, data, tmp_path / "wrong", settings)
    assert wrong.curve != pytest.approx(serial.curve, rel=1e-3)
