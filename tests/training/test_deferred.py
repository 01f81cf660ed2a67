"""Runs whose ranks build no more of the network than their parts."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tiny
from convoy import models
from convoy.engine.coupling import probe_of_graph
from convoy.graph.deferred import deferred, deferred_tensors
from convoy.training import build, load_recipe, set_up
from convoy.training.build import build_for, probed
from ranks import run_ranks
from tiny import TinyNet, write_mnist
from whole_runs import Ended, as_before, train_here, train_until

CPU = torch.device("cpu")
SETTINGS = {"epochs": "6ba", "checkpoint.every": "3ba", "reproducible": "true"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("deferred") / "data")


@contextlib.contextmanager
def large(least: int) -> Iterator[list[bool]]:
    """Networks of so many bytes are large; whether the runs within it had deferred ones."""
    found: list[bool] = []

    def noted(*args: object) -> object:
        model, notes = build_for(*args)  # type: ignore[arg-type]
        found.append(bool(deferred_tensors(model)))
        return model, notes

    with as_before() as patch:
        patch.setattr(build, "LARGE", least)
        patch.setattr(set_up, "build_for", noted)
        yield found


def trained(data: Path, out: Path, settings: dict[str, str], least: int) -> tuple[Ended, list[bool]]:
    with large(least) as found:
        return train_here(data, out, SETTINGS | settings), found


@pytest.mark.parametrize("settings", [{"parallel.plan": "sample=2"}, {"parallel.plan": "filter=2", "ema.decay": "0.9"}])
def test_a_run_is_bit_by_bit_the_same(data: Path, tmp_path: Path, settings: dict[str, str]) -> None:
    ((plain, was), _) = run_ranks(trained, 2, data, tmp_path / "plain", settings, 2**30)
    ((lean, is_deferred), _) = run_ranks(trained, 2, data, tmp_path / "lean", settings, 0)
    assert (was, is_deferred) == ([False], [True])
    assert (lean.digest, lean.curve) == (plain.digest, plain.curve)


@pytest.mark.slow
def test_weights_of_a_file_reach_it(data: Path, tmp_path: Path) -> None:
    torch.manual_seed(9)
    save_file(TinyNet().state_dict(), tmp_path / "given.safetensors")
    torch.save(TinyNet().state_dict(), tmp_path / "given.pth")
    for name in ("given.safetensors", "given.pth"):
        settings = {"parallel.plan": "filter=2", "model.weights": str(tmp_path / name)}
        ((plain, _), _) = run_ranks(trained, 2, data, tmp_path / f"plain {name}", settings, 2**30)
        ((lean, is_deferred), _) = run_ranks(trained, 2, data, tmp_path / f"lean {name}", settings, 0)
        assert is_deferred == [True]
        assert (lean.digest, lean.curve) == (plain.digest, plain.curve)


def resumed(data: Path, out: Path, settings: dict[str, str], after: int | None) -> Ended | None:
    with large(0):
        return train_until(data, out, SETTINGS | settings, after)


def test_it_goes_on_from_a_checkpoint(data: Path, tmp_path: Path) -> None:
    settings = {"parallel.plan": "filter=2", "ema.decay": "0.9", "checkpoint.every": "2ba"}
    (whole, _) = run_ranks(resumed, 2, data, tmp_path / "whole", settings, None)
    run_ranks(resumed, 2, data, tmp_path / "run", settings, 5)
    (again, _) = run_ranks(resumed, 2, data, tmp_path / "run", settings, None)
    assert whole is not None and again is not None
    assert again.said[0].startswith(("going on after 2 of 6 updates", "going on after 4 of 6 updates"))
    assert (again.digest, again.curve) == (whole.digest, whole.curve)


class Stubborn(TinyNet):
    """Looks at where its numbers lie."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__(num_classes, in_channels)
        self.conv.weight.data.resize_(8, in_channels, 3, 3).resize_(1).resize_(8, in_channels, 3, 3).fill_(0.1)


def test_what_cannot_be_deferred_is_built_whole(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"model.name": "training.test_deferred:Stubborn", "parallel.plan": "filter=2"}
    ((lean, is_deferred), _) = run_ranks(trained, 2, data, tmp_path / "lean", settings, 0)
    assert is_deferred == [False]
    assert any(
        note.startswith("every device builds all of training.test_deferred:Stubborn before it takes its part, as")
        for note in lean.said
    )


CALLS = ["TinyNet", "TinyDepth", "TinyAgain", "TinyCoupled", "TinyDrawing", "TinyTraining", "TinyAsleep"]


@pytest.mark.parametrize("name", CALLS)
def test_the_graph_tells_what_a_trial_shows(name: str) -> None:
    recipe = load_recipe("default", [f"model.name=tiny:{name}"])
    found = probed(getattr(tiny, name)(), recipe, (1, 28, 28), (4,), CPU, "nothing")
    with deferred():
        model = getattr(tiny, name)()
    told = probed(model, recipe, (1, 28, 28), (4,), CPU, "nothing", 10)
    assert replace(told, bytes_per_sample=0) == replace(found, bytes_per_sample=0)


@pytest.mark.parametrize(
    "name",
    ["lenet", "resnet18-cifar", pytest.param("googlenet", marks=pytest.mark.slow), "vgg11_bn-cifar", "squeezenet1_0"],
)
def test_the_graph_tells_how_much_stays(name: str) -> None:
    shape = models.describe(name).input_shape
    assert shape is not None
    model = models.create(name)
    recipe = load_recipe("default", [f"model.name={name}"])
    found = probed(model, recipe, shape, (2,), CPU, "nothing")
    told = probe_of_graph(copy.deepcopy(model), shape, CPU)
    assert replace(told, bytes_per_sample=0) == replace(found, bytes_per_sample=0)
    assert told.bytes_per_sample == pytest.approx(found.bytes_per_sample, rel=0.02)
