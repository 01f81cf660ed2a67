"""What the first of many GPUs waits for in an update, and the lists given to it, counted without one."""

from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from measuring.dispatch import Counts, FakeGpu, fake_ranks
from torch import Tensor, nn

import convoy
import small_nets
from convoy import models
from convoy.data.config import AugmentConfig, DataConfig
from convoy.data.dataset import DataSet
from convoy.data.loader import training_batches
from convoy.data.order import Order
from convoy.data.pixels import PixelSource
from convoy.plans.plan import Plan
from convoy.recipe.optim import Schedule
from convoy.recipe.recipe import load_recipe
from convoy.tasks.registry import create_task
from convoy.training.division import divide
from convoy.training.evaluation import InputPipeline
from convoy.training.gradients import Exchange, divided_network
from convoy.training.optimizer import create_optimizer
from convoy.training.precision import Scaler
from convoy.training.state import RunState
from convoy.training.step import TrainingStep

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor", "ignore:.* without Triton")


def test_an_update_of_the_trainer_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    recipe = load_recipe("default", ["model.name=alexnet-cifar", "data.path=none", "batch=64", "microbatch=8"])
    config, division = DataConfig(augment=AugmentConfig(crop="pad", flip=True)), divide((8,) * 8, 4)
    pixels, labels, passes = np.zeros((64, 32, 32, 3), np.uint8), np.zeros(64, np.int64), division.passes(merge=2)
    sources = (PixelSource(pixels, labels, "made") for _ in range(2))
    data = DataSet("made", list("0123456789"), *sources, 32, 3, (0.5,) * 3, (0.2,) * 3, 32)
    with fake_ranks(4), FakeGpu() as gpu:
        model, example = gpu.take(models.create("alexnet-cifar")), gpu.take(torch.rand(8, 3, 32, 32))
        exchange = Exchange(divided_network(model, Plan.parse("sample=4"), example, recipe), recipe)
        exchange.divide(division, len(passes))
        state = RunState(exchange, create_optimizer(model, recipe.optimizer, 0.1), Scaler(gpu.device, "fp32"))
        schedule = cast(Schedule, SimpleNamespace(lr=lambda update: 0.1))
        pipeline = InputPipeline(data, gpu.device, torch.contiguous_format)
        step = TrainingStep(
            recipe, create_task(recipe, data.classes), state, pipeline, schedule, passes, rank=0, reseed=False
        )
        made = training_batches(data, config, Order(64, 16, 0), first_update=0, num_updates=6, seed=0, pin_memory=True)
        with closing(made) as batches:
            for update, batch in enumerate(batches):
                with gpu.count() as seen:
                    step(batch, update)
    assert not seen.synchronizations, seen.synchronizations
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
        return self.last(F.interpolate(y, size=x.shape[2:], mode="bilinear"))


PLANS = ("owt=4", "sample=2,filter=2", "height=2,width=2")
CASES: list[tuple[Callable[[], nn.Module], tuple[str, ...]]] = [(Resized, PLANS), (small_nets.Shuffle, ("filter=4",))]


def third_pass(net: Callable[[], nn.Module], plan: str) -> tuple[Counts, list[Any]]:
    """Of a loop of one's own: the first copies what stays, and agrees on the order of messages. Apart, the lists sent,
    without the keys of the samples, which every pass of a network that drops needs anew, and nobody waits for."""
    with fake_ranks(4), FakeGpu() as gpu:
        images = gpu.take(torch.rand(4, 3, 32, 32))
        model = convoy.parallelize(gpu.take(net()), plan, example=images, checks=False)

        def run() -> None:
            convoy.global_mean(model, model(images).flatten(1).square(), len(images)).backward()

        run()
        run()
        with gpu.count() as seen:
            run()
        assert all(p.grad is not None and p.grad.device == FakeGpu.device for p in model.parameters())
    return seen, [event for event in seen.uploads if "context.py" not in event.line]


def test_no_pass_waits_for_the_gpu_or_gives_it_lists() -> None:
    for net, plans in CASES:
        for plan in plans:
            seen, uploads = third_pass(net, plan)
            assert not seen.synchronizations, (plan, seen.synchronizations)
            assert not uploads, (plan, uploads)
            assert seen.operations["convolution"] == seen.operations["convolution_backward"] > 0
            assert seen.collectives.total() > 0
    with FakeGpu() as gpu:  # the control
        x = gpu.take(torch.ones(4))
        with gpu.count() as counted:
            x[[0, 2]].sum().item()
    assert (len(counted.synchronizations), len(counted.uploads)) == (2, 1)
