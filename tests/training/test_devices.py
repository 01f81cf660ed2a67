"""The plan is no part of the experiment: runs on several devices are those of one, and mistakes in that are noticed."""

import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from convoy.ops.statistics import RunningStatistics
from convoy.plans.plan import Plan
from convoy.tasks.classification import Classification
from convoy.training import watchdog
from convoy.training.build import TriedNetwork
from convoy.training.division import Division
from convoy.training.environment import join_ranks
from convoy.training.evaluation import InputPipeline
from convoy.training.step import TrainingStep
from ranks import run_ranks
from training.scenarios import Settings, drop_checkpoints, refusals, summary
from whole_runs import Ended, as_before, train_here, train_until

BITS = {"reproducible": "true", "epochs": "3ba"}
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def serial(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run_ranks(train_here, 1, data, tmp_path_factory.mktemp("serial") / "run", BITS)[0]


@pytest.fixture(scope="module")
def divided(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Filters add up otherwise than one device does: the same bits on any sample axis beside them."""
    settings = BITS | {"parallel.plan": "filter=2"}
    return run_ranks(train_here, 2, data, tmp_path_factory.mktemp("divided") / "run", settings)[0]


def on_plan(data: Path, out: Path, plan: str, settings: Settings) -> list[Ended]:
    world = 1 if plan == "serial" else Plan.parse(plan).mesh.num_devices
    return run_ranks(train_here, world, data, out, settings | {"parallel.plan": plan}, timeout=120)


@pytest.mark.parametrize(
    ("plan", "more"),
    [
        ("sample=2", {"recompute": "true"}),
        ("sample=3", {"parallel.shares": "[1,6,1]"}),
        pytest.param("stage=2", {"parallel.schedule": "gpipe", "recompute": "true"}, marks=slow),
        ("sample=2,filter=2", {"parallel.shares": "[3,1]"}),
    ],
)
def test_reproducible_weights_are_those_of_one_device_bit_for_bit(
    data: Path, tmp_path: Path, serial: Ended, divided: Ended, plan: str, more: Settings
) -> None:
    want = divided if "filter" in plan else serial
    for found in on_plan(data, tmp_path / "run", plan, BITS | more):
        assert (found.digest, found.curve) == (want.digest, want.curve)


def _from_even_places(data: Path, out: Path) -> Ended:
    """Each part has as many microbatches as its share says, but from where it would begin if all were alike."""

    def microbatches(self: Division, rank: int) -> range:
        start = rank * len(self.sizes) // len(self.counts)
        return range(start, start + self.counts[rank])

    with as_before() as patch:
        patch.setattr(Division, "microbatches", microbatches)
        return train_here(data, out, BITS | {"parallel.shares": "[3,1]"})


def test_other_parts_would_be_noticed(data: Path, tmp_path: Path, serial: Ended) -> None:
    assert run_ranks(_from_even_places, 2, data, tmp_path / "run")[0].digest != serial.digest


# Devices that come and go

CRASHES = [("stage=2,sample=2", 5), ("sample=2", 8), ("stage=3", 11), ("stage=2", None)]


@pytest.mark.slow
def test_devices_come_and_go_after_crashes_between_checkpoints(data: Path, tmp_path: Path) -> None:
    settings = {"epochs": "16ba", "checkpoint.every": "2ba", "evaluate_every": "5ba", "reproducible": "true"}
    (want,) = run_ranks(train_here, 1, data, tmp_path / "serial", settings)
    out = tmp_path / "run"
    for plan, after in CRASHES:
        world = Plan.parse(plan).mesh.num_devices
        ended = run_ranks(train_until, world, data, out, settings | {"parallel.plan": plan}, after)[0]
    assert ended is not None
    going_on = re.match(r"going on after (\d+) of 16 updates", ended.said[0])
    assert going_on is not None
    assert 6 <= int(going_on[1]) <= 12  # the checkpoint on its way when the ranks were gone may be lost
    assert (ended.digest, ended.curve) == (want.digest, want.curve)


# What is approximate, and called so


def apart(a: Ended, b: Ended) -> float:
    return max(abs(x - y) / y for x, y in zip(a.curve, b.curve, strict=True))


APPROXIMATE = {
    "gradient_compression=bf16": ("gradients are sent in bf16", 1e-6),
    "local_sgd=3": ("local SGD averages the weights every 3 updates", 1e-3),
}


def test_an_approximate_run_is_called_so_and_is_near(data: Path, tmp_path: Path) -> None:
    shared = {"epochs": "6ba", "optimizer.lr": "0.02"}
    serial, exact = (on_plan(data, tmp_path / plan, plan, shared)[0] for plan in ("serial", "sample=2"))
    assert not any("approximate" in sentence for sentence in exact.said) and apart(exact, serial) < 1e-5
    for setting, (words, least) in APPROXIMATE.items():
        key, value = setting.split("=")
        first, second = on_plan(data, tmp_path / key, "sample=2", shared | {f"parallel.{key}": value})
        assert first.digest == second.digest and least < apart(first, serial) < 0.2
        assert f"approximate: {words}, so the result differs from that of one device" in first.said
        assert summary(tmp_path / key)["approximate"] == words


@slow
def test_local_sgd_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(data: Path, tmp_path: Path) -> None:
    settings = {"parallel.local_sgd": "2", "optimizer.lr": "0.02", "epochs": "7ba"}
    settings |= {"checkpoint.every": "3ba", "checkpoint.keep": "9", "parallel.averaging.staleness": "1"}
    settings |= {"parallel.gradient_compression": "topk:0.3", "evaluate_every": "5ba"}
    whole, *_ = run_ranks(train_here, 2, data, tmp_path / "whole", settings)
    drop_checkpoints(shutil.copytree(tmp_path / "whole", tmp_path / "parts"), 3)
    parts, *_ = run_ranks(train_here, 2, data, tmp_path / "parts", settings, True)
    assert (parts.digest, parts.curve) == (whole.digest, whole.curve)


def _with_a_slow_rank(data: Path, out: Path, settings: Settings, seconds: float) -> Ended:
    """Rank 1 has a slow way to its pictures."""
    with as_before() as patch:
        patch.setattr(watchdog, "STRETCH_S", 0.0)
        prepare, rank = InputPipeline.__call__, join_ranks()[0].rank

        def late(self: InputPipeline, *args: Any) -> object:
            time.sleep(seconds * rank)
            return prepare(self, *args)

        patch.setattr(InputPipeline, "__call__", late)
        return train_here(data, out, settings)


@slow
def test_measured_shares_change_no_number(data: Path, tmp_path: Path) -> None:
    settings = {"epochs": "10ba", "reproducible": "true"}
    (serial,) = run_ranks(train_here, 1, data, tmp_path / "serial", settings)
    settings |= {"parallel.shares": "auto"}
    found, _ = run_ranks(_with_a_slow_rank, 2, data, tmp_path / "run", settings, 0.1, timeout=120)
    (sentence,) = {sentence for sentence in found.said if sentence.startswith("shares ")}
    assert "of 8 microbatches, by measured times of" in sentence
    assert int(sentence.split()[1].partition(",")[0]) > 4, sentence
    assert not any("approximate" in each for each in found.said)
    assert (found.digest, found.curve) == (serial.digest, serial.curve)


# The schedule zero-bubble, in float64

ALL = {"ema.decay": "0.9", "optimizer.name": "lars", "optimizer.lr": "0.5", "clip_norm": "0.05"}
DOUBLE = {"model.name": "tiny:TinyDouble", "epochs": "6ba"}


def distance(one: Path, other: Path) -> float:
    """The largest of any tensor of the weights that are delivered, as a part of its largest element."""
    have, want = (load_file(run / "weights.safetensors") for run in (one, other))
    assert have.keys() == want.keys()
    assert any(tensor.dtype == torch.float64 for tensor in want.values())
    return max(float((have[n] - want[n]).abs().max() / want[n].abs().max().clamp(min=1e-9)) for n in want)


WHITE = {"model.name": "tiny:TinyWhite", "model.whiten": "50", "lookahead.every": "2", "evaluation_views": "6"}
WHITE |= {
    "optimizer.groups": "[{parameters: 'norm.bias', lr_factor: 4, until: 3ba}, {parameters: 'aux.*', lr_factor: 0}]"
}


def test_whitening_lookahead_groups_and_views_are_those_of_one_device(data: Path, tmp_path: Path) -> None:
    settings, shares = DOUBLE | WHITE, {"parallel.shares": "[3,1]"}
    (want,) = on_plan(data, tmp_path / "serial", "serial", settings)
    for plan in ("filter=2", "height=2", "sample=2", "stage=2"):
        for ended in on_plan(data, tmp_path / plan, plan, settings | (shares if plan == "sample=2" else {})):
            assert ended.curve == pytest.approx(want.curve, rel=1e-6), plan  # recorded in float32
        assert distance(tmp_path / plan, tmp_path / "serial") < 1e-9, plan
    on_plan(data, tmp_path / "other", "sample=2", settings | shares | {"lookahead.step": "0.51"})
    assert distance(tmp_path / "other", tmp_path / "serial") > 1e-6


GROWING = {"model.name": "tiny:TinyResidual", "loss.name": "bce", "loss.target_threshold": "0.2", "epochs": "6ba"}
GROWING |= {"data.augment.crop": "random-resized", "data.progressive": "{from_size: 16, begin: 0, end: 1}"}
GROWING |= {"data.repeats": "3", "data.mix": "{mixup: 0.4, cutmix: 1}", "data.workers": "0"}
GROWING |= {"data.evaluation_size": "32"}


def _with_shares_that_count_alike(data: Path, out: Path, settings: Settings) -> Ended:
    """The mean over a rank's samples counts as if all ranks had as many."""

    def part(self: TrainingStep, outputs: Any, targets: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.task.loss(outputs, targets) / 2 / len(self.passes)

    with as_before() as patch:
        patch.setattr(TrainingStep, "_part_of_mean", part)
        return train_here(data, out, settings)


@pytest.mark.parametrize("plan", ["filter=2", "height=2", "sample=2", pytest.param("stage=2", marks=slow)])
def test_growing_repeated_pictures_and_binary_losses_train_as_on_one_device(
    data: Path, tmp_path: Path, plan: str
) -> None:
    settings = GROWING | ({"parallel.shares": "[3,1]"} if plan == "sample=2" else {})
    (want,) = on_plan(data, tmp_path / "serial", "serial", GROWING)
    for ended in on_plan(data, tmp_path / "run", plan, settings):
        assert ended.curve == pytest.approx(want.curve, rel=1e-6)  # recorded in float32
    assert distance(tmp_path / "run", tmp_path / "serial") < 1e-9
    if plan == "sample=2":
        run_ranks(_with_shares_that_count_alike, 2, data, tmp_path / "other", settings)
        assert distance(tmp_path / "other", tmp_path / "serial") > 1e-6
    if plan == "height=2":
        small = settings | {"parallel.plan": plan, "data.progressive": "{from_size: 2, begin: 0, end: 1}"}
        words = "pictures of 2×2 pixels (data.progressive) cannot run under the plan height=2: "
        assert all(words in said[0] for said in run_ranks(refusals, 2, data, tmp_path / "small", [small]))


WEIGHTED = DOUBLE | {"epochs": "5ba", "loss.class_weights": "{'1': 5, '2': 0.2}", "data.sampling": "{'3': 4, '4': 0}"}


def _with_torchs_weighted_mean(data: Path, out: Path, settings: Settings) -> Ended:
    """The weighted mean over the samples of each microbatch."""

    def of_head(self: Classification, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets, self._weights(outputs))

    with as_before() as patch:
        patch.setattr(Classification, "_loss_of_head", of_head)
        return train_here(data, out, settings)


def test_class_weights_and_weighted_sampling_train_as_on_one_device(data: Path, tmp_path: Path) -> None:
    (want,) = on_plan(data, tmp_path / "serial", "serial", WEIGHTED)
    shares = WEIGHTED | {"parallel.shares": "[3,1]"}
    for plan in ("filter=2", "height=2", "sample=2", "stage=2"):
        for ended in on_plan(data, tmp_path / plan, plan, shares if plan == "sample=2" else WEIGHTED):
            assert ended.curve == pytest.approx(want.curve, rel=1e-6), plan  # recorded in float32
        assert distance(tmp_path / plan, tmp_path / "serial") < 1e-9, plan
    run_ranks(_with_torchs_weighted_mean, 2, data, tmp_path / "other", shares)
    assert distance(tmp_path / "other", tmp_path / "serial") > 1e-6


def in_small_passes(forgets: bool, *arguments: Any) -> int:
    """How often a rank leaves out a pass in which it has no samples; running statistics need to know of it."""
    record, left_out = RunningStatistics.record_left_out, list[Any]()

    def noted(self: RunningStatistics, *passes: Any) -> None:
        left_out.append(passes)
        if not forgets:
            record(self, *passes)

    with as_before() as patch:
        patch.setattr(TriedNetwork, "microbatches_in_pass", lambda *_: (4, "four at once"))
        patch.setattr(RunningStatistics, "record_left_out", noted)
        train_here(*arguments)
    return len(left_out)


def test_uneven_shares_and_zero_bubble_train_and_go_on_as_one_device_does(data: Path, tmp_path: Path) -> None:
    settings = DOUBLE | ALL | {"microbatch": "2", "checkpoint.every": "2ba"}
    (want,) = run_ranks(train_here, 1, data, tmp_path / "serial", settings)
    uneven = settings | {"parallel.plan": "sample=2", "parallel.shares": "[1,11]"}  # rank 0, which saves, has few
    for name, forgets in (("uneven", False), ("control", True)):
        assert any(run_ranks(in_small_passes, 2, forgets, data, tmp_path / name, uneven))
    assert distance(tmp_path / "uneven", tmp_path / "serial") < 1e-9
    assert distance(tmp_path / "control", tmp_path / "serial") > 1e-6
    settings |= {"parallel.plan": "stage=2", "parallel.schedule": "zero-bubble"}
    assert run_ranks(train_until, 2, data, tmp_path / "run", settings, 5) == [None] * 2
    for ended in run_ranks(train_until, 2, data, tmp_path / "run", settings, None):
        assert ended.curve == pytest.approx(want.curve, rel=1e-6)  # recorded in float32
    assert distance(tmp_path / "run", tmp_path / "serial") < 1e-9
    assert any("zero-bubble, stages wait about" in note for note in summary(tmp_path / "run")["notes"])
