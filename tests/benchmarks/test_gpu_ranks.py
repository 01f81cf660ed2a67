"""What the first of many GPUs does in an update, counted without one: `benchmarks/gpu_ranks.py` and passes of plans."""

import argparse
import itertools
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from gpu_ranks import MODELS, Row, Work, markdown, measure
from measuring.dispatch import Counts, FakeGpu, fake_ranks, lines
from torch import Tensor, nn

import convoy
import small_nets
from convoy import models
from convoy.comm import collectives
from convoy.data import AugmentConfig, Batch, DataConfig, DataSet, Order, training_batches
from convoy.data.buffers import Buffers
from convoy.data.crops import Crops
from convoy.data.loader import bring_to
from convoy.data.sources import PixelSource
from convoy.engine import agreement
from convoy.ops.constants import Constants
from convoy.plans.plan import Plan
from convoy.training import load_recipe
from convoy.training.division import divide
from convoy.training.input import InputPipeline
from convoy.training.optimizers import create_optimizer
from convoy.training.parallel import Method, ParallelNetwork
from convoy.training.precision import Scaler
from convoy.training.schedules import Schedule
from convoy.training.state import RunState
from convoy.training.step import TrainingStep

WORK = Work(batch=8, microbatch=2, size=64)
FAKE = argparse.Namespace(device="fake", precision="fp32", updates=0)

AT_MOST = {
    "resnet50": {"microbatch": 0.95, "sync": 1.2, "local": 1.2},
    "efficientnet_b0": {"microbatch": 1.2, "sync": 1.2, "local": 1.2},
    "convnext_t": {"microbatch": 1.2, "sync": 1.2, "local": 1.2},
    "alexnet": {"microbatch": 1.2, "sync": 1.2, "local": 1.2},
}
"""Operations beside the plain network's. A batch norm layer over all ranks is four where it is two alone; that a ReLU
behind it is none of its own makes up for most of that."""


def _rows(name: str, batch_norm: Any) -> tuple[Row, Row, Row]:
    plain, _ = measure(name, None, 1, WORK, FAKE)
    few, _ = measure(name, batch_norm, 8, WORK, FAKE)
    many, seen = measure(name, batch_norm, 64, WORK, FAKE)
    assert not seen.synchronizations, lines(seen.synchronizations)
    return plain, few, many


QUICK, SLOW = [("alexnet", "local")], [("resnet50", "sync"), ("efficientnet_b0", "microbatch"), ("convnext_t", "local")]
REST = [(name, norm) for name, bars in AT_MOST.items() for norm in bars if (name, norm) not in QUICK + SLOW]


@pytest.mark.parametrize(
    ("name", "batch_norm"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in REST),
    ],
)
def test_an_update_of_rank_0(name: str, batch_norm: str) -> None:
    plain, few, many = _rows(name, batch_norm)
    assert few.operations <= AT_MOST[name][batch_norm] * plain.operations
    assert few.passes == many.passes == 1
    assert few.waits == many.waits == 0
    assert few.uploads == many.uploads <= 1, "the keys of the samples"
    for what in ("operations", "views", "host", "collectives"):
        assert getattr(few, what) == getattr(many, what), what
    assert f"| {few.operations / plain.operations:.2f} |" in markdown([plain, few])


@pytest.mark.parametrize("there", [False, True])
def test_a_loop_over_batches_waits_for_nothing(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether pictures come from pinned memory or lie on the GPU, where places and labels are sent."""
    monkeypatch.setattr(Buffers, "_pin", lambda self: True)
    config = DataConfig(augment=AugmentConfig(crop="pad", flip=True))
    pixels, labels = np.zeros((64, 32, 32, 3), np.uint8), np.zeros(64, np.int64)
    sources = (PixelSource(pixels, labels, "made") for _ in range(2))
    data = DataSet("made", list("ab"), *sources, 32, 3, (0.5,) * 3, (0.2,) * 3, 32)
    with FakeGpu() as gpu:
        bring_to(gpu.device, data, config, there * 2**30)
        pipeline = InputPipeline(data, gpu.device, torch.channels_last)
        made = training_batches(data, config, Order(64, 16, 0), first_update=0, num_updates=6, seed=0, pin_memory=True)
        with gpu.count() as seen, closing(made) as batches:
            for batch in batches:
                assert isinstance(batch.images, Crops) == there
                labels = pipeline.labels(batch)
                images = pipeline(batch, 0, 8)
                assert labels.is_cuda and images.is_cuda and images.shape == (8, 3, 32, 32)
    assert not seen.synchronizations, lines(seen.synchronizations)
    assert len(seen.uploads) == 6 * 2


def test_every_network_has_its_bars() -> None:
    assert AT_MOST.keys() == MODELS.keys()


def test_an_update_of_the_trainer_waits_for_nothing() -> None:
    recipe = load_recipe("default", ["model.name=alexnet-cifar", "data.path=none", "batch=64", "microbatch=8"])
    division = divide((8,) * 8, 4)
    passes = division.passes(merge=2)
    pictures = SimpleNamespace(mean=(0.5,) * 3, std=(0.2,) * 3, classes=list("0123456789"))
    with fake_ranks(4), FakeGpu() as gpu:
        model = gpu.take(models.create("alexnet-cifar"))
        example = gpu.take(torch.rand(8, 3, 32, 32))
        network = ParallelNetwork(
            model, Plan.parse("sample=4"), example, batch_norm="microbatch", seed=0, method=Method()
        )
        network.divide(division, len(passes))
        state = RunState(network, create_optimizer(model, recipe.optimizer, 0.1), Scaler(gpu.device, "fp32"))
        pipeline = InputPipeline(cast(DataSet, pictures), gpu.device, torch.contiguous_format)
        schedule = cast(Schedule, SimpleNamespace(lr=lambda update: 0.1))
        step = TrainingStep(recipe, state, pipeline, schedule, passes, rank=0, reseed=False)
        batch = Batch(
            torch.zeros(16, 3, 32, 32, dtype=torch.uint8), torch.zeros(16, dtype=torch.int64), torch.arange(16)
        )
        for update in range(2):
            step(batch, update)
        with gpu.count() as seen:
            step(batch, 2)
    assert not seen.synchronizations, lines(seen.synchronizations)
    assert len(seen.uploads) == 3, "pictures, labels and the keys of the samples"


# Passes under other plans.


class Resized(nn.Module):
    """Rows that are made again and dropped elements, which need lists of numbers on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.drop = nn.Dropout(0.3)
        self.pool = nn.AvgPool2d(3, 2, 1, count_include_pad=False)
        self.last = nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] to [N, 4, H, W]."""
        y = self.pool(self.drop(self.conv(x)))
        return self.last(nn.functional.interpolate(y, size=x.shape[2:], mode="bilinear"))


NETS: dict[str, Callable[[], nn.Module]] = {
    "resized": Resized,
    "dense": small_nets.Dense,
    "shuffled": small_nets.Shuffle,
    "permuted": small_nets.Permuted,
    "dropping": small_nets.Dropping,
    "alexnet": lambda: models.create("alexnet-cifar"),
}
PLANS = ("sample=4", "filter=4", "height=4", "owt=4", "sample=2,filter=2", "height=2,width=2")


def _pass(net: Callable[[], nn.Module], plan: str) -> Counts:
    """The third pass of a loop of one's own: the first copies what stays, and agrees on the order of messages."""
    with fake_ranks(4), FakeGpu() as gpu:
        images = gpu.take(torch.rand(4, 3, 32, 32))
        model = convoy.parallelize(gpu.take(net()), plan, example=images, checks=False)
        for _ in range(2):
            _loss(model, images).backward()
        with gpu.count() as seen:
            _loss(model, images).backward()
    return seen


def _loss(model: nn.Module, images: Tensor) -> Tensor:
    outputs = model(images)
    return convoy.global_mean(model, outputs.flatten(1).square(), len(images))


def _of_lists(events: list[Any]) -> list[Any]:
    """Without the keys of the samples, which every pass of a network that drops needs anew, and nobody waits for."""
    return [event for event in events if "context.py" not in event.line]


QUICK = [*(("resized", plan) for plan in PLANS), ("shuffled", "filter=4")]
OTHERS = [case for case in itertools.product(NETS, PLANS) if case not in QUICK]


@pytest.mark.parametrize(("name", "plan"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)])
def test_no_pass_waits_for_the_gpu_or_gives_it_lists(name: str, plan: str) -> None:
    seen = _pass(NETS[name], plan)
    assert not seen.synchronizations, lines(seen.synchronizations)
    assert not _of_lists(seen.uploads), lines(seen.uploads)


def test_lists_that_are_copied_in_every_pass_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def anew(self: Constants, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.as_tensor(self._numbers, dtype=dtype or x.dtype, device=x.device)

    monkeypatch.setattr(Constants, "like", anew)
    seen = _pass(Resized, "height=4")
    files = {event.line.rpartition("/")[2].partition(":")[0] for event in seen.uploads}
    assert len(seen.synchronizations) == len(_of_lists(seen.uploads)) >= 3, files


def test_sizes_told_over_the_gpu_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def over_the_gpu(numbers: Any, group: Any) -> list[list[int]]:
        mine = torch.tensor(list(numbers), device=FakeGpu.device)
        rows: list[list[int]] = collectives.all_gather(mine, group).tolist()
        return [list(numbers)] * len(rows)  # what is read there is zero

    monkeypatch.setattr(agreement, "gather_ints", over_the_gpu)
    seen = _pass(Resized, "sample=4")
    assert len(seen.synchronizations) == 2
    assert len(_of_lists(seen.uploads)) == 1
