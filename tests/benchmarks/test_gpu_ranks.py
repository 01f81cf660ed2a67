"""What the first of many GPUs does in an update, counted without one: operations, waits for it, lists given to it."""

import argparse
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gpu_ranks import MODELS, Work, markdown, measure
from measuring.dispatch import Counts, FakeGpu, fake_ranks, lines
from torch import Tensor, nn

import convoy
import small_nets
from convoy import models
from convoy.comm import collectives
from convoy.data import AugmentConfig, Batch, DataConfig, DataSet, Order, training_batches
from convoy.data.batch import Crops
from convoy.data.loader import bring_to
from convoy.data.sources import PixelSource
from convoy.data.workers import Buffers
from convoy.engine import agreement
from convoy.ops.constants import Constants
from convoy.plans.plan import Plan
from convoy.training import load_recipe
from convoy.training.division import divide
from convoy.training.input import InputPipeline
from convoy.training.optimizers import create_optimizer
from convoy.training.parallel import Method, TrainedNetwork
from convoy.training.precision import Scaler
from convoy.training.schedules import Schedule
from convoy.training.state import RunState
from convoy.training.step import TrainingStep

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

# By name: a call on a tensor of the fake GPU, for how many reads the host waits then, and how many lists it sends.
CALLS: dict[str, tuple[Callable[[Tensor], Any], int, int]] = {
    "item": (lambda x: x.sum().item(), 1, 0),
    "bool": (lambda x: bool((x > 0).any()), 1, 0),
    "float": (lambda x: float(x[0]), 1, 0),
    "tolist": (lambda x: x.tolist(), 1, 0),
    "to the CPU": (lambda x: x.cpu(), 1, 0),
    "equal": (lambda x: torch.equal(x, x + 1), 1, 0),
    "into a tensor of the CPU": (lambda x: torch.ones(4).copy_(x), 1, 0),
    "synchronize": (lambda x: torch.cuda.synchronize(), 1, 0),
    "a list": (lambda x: torch.tensor([1.0, 2.0], device=x.device), 1, 1),
    "new_tensor": (lambda x: x.new_tensor([1.0, 2.0]), 1, 1),
    "an index": (lambda x: x[[0, 2]], 1, 1),
    "an index of the CPU": (lambda x: x[torch.tensor([0, 2])], 1, 1),
    "from a tensor of the CPU": (lambda x: x.copy_(torch.ones(4)), 1, 1),
    "a copy that nobody waits for": (lambda x: torch.ones(3).to(x.device, non_blocking=True), 0, 1),
    "a slice": (lambda x: x[1:3] * 2.0, 0, 0),
    "is it there": (lambda x: x.is_cuda or x.item(), 0, 0),
    "the same device": (lambda x: x.to("cuda:0"), 0, 0),
    "fill": (lambda x: torch.full((4,), 2.0, device=x.device) + x, 0, 0),
    "a number": (lambda x: x.fill_(2.0), 0, 0),
    "lists of the CPU": (lambda x: torch.tensor([1, 2]).tolist(), 0, 0),
}


def test_waits_and_lists_are_seen_where_they_are() -> None:
    for name, (call, waits, uploads) in CALLS.items():
        with FakeGpu() as gpu:
            x = gpu.take(torch.ones(4))
            with gpu.count() as seen:
                call(x)
        assert (len(seen.synchronizations), len(seen.uploads)) == (waits, uploads), name
        assert all("test_gpu_ranks.py" in str(event) for event in seen.synchronizations)
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(1, device="cuda")  # no device is left behind


BARS = {"resnet50": {"sync": 1.2, "microbatch": 0.95}, "efficientnet_b0": {"microbatch": 1.2}}
BARS |= {"convnext_t": {"local": 1.2}, "alexnet": {"local": 1.2}}
"""Operations beside the plain network's. A batch norm layer over all ranks is four where it is two alone; that a ReLU
behind it is none of its own makes up for most of that."""
WORK = Work(batch=8, microbatch=2, size=64)
FAKE = argparse.Namespace(device="fake", precision="fp32", updates=0)


@pytest.mark.parametrize(
    ("name", "batch_norm"),
    [
        pytest.param(name, norm, marks=() if name == "alexnet" else pytest.mark.slow)
        for name, bars in BARS.items()
        for norm in bars
    ],
)
def test_an_update_of_rank_0_does_no_more_on_many_ranks(name: str, batch_norm: Any) -> None:
    plain, _ = measure(name, None, 1, WORK, FAKE)
    few, _ = measure(name, batch_norm, 8, WORK, FAKE)
    many, seen = measure(name, batch_norm, 64, WORK, FAKE)
    assert not seen.synchronizations, lines(seen.synchronizations)
    assert few.operations <= BARS[name][batch_norm] * plain.operations
    assert few.passes == many.passes == 1 and few.waits == many.waits == 0
    assert few.uploads == many.uploads <= 1, "the keys of the samples"
    for what in ("operations", "views", "host", "collectives"):
        assert getattr(few, what) == getattr(many, what), what
    assert f"| {few.operations / plain.operations:.2f} |" in markdown([plain, few])
    assert BARS.keys() == MODELS.keys()


def counted(ranks: int, batch_norm: Any) -> Counts:
    """The second update of ResNet-18, by itself where no batch norm is said; the first copies what stays."""
    with fake_ranks(ranks), FakeGpu() as gpu:
        network: Any = gpu.take(models.create("resnet18"))
        if batch_norm is not None:
            plan, method = Plan.parse(f"sample={ranks}" if ranks > 1 else "serial"), Method()
            example = gpu.take(torch.rand(2, 3, 32, 32))
            network = TrainedNetwork(network, plan, example, batch_norm=batch_norm, seed=0, method=method)
            (piece,) = divide((2,) * 4 * ranks, ranks).passes(4)
        images, labels = gpu.take(torch.rand(8, 3, 32, 32)), gpu.take(torch.zeros(8, dtype=torch.int64))

        def run(update: int) -> None:
            if batch_norm is None:
                F.cross_entropy(network(images), labels).backward()
                return
            network.enter(update, piece)
            F.cross_entropy(network.forward(images), labels).backward()
            network.finish_update()

        run(0)
        with gpu.count() as seen:
            run(1)
        return seen


@pytest.mark.slow
def test_batch_norm_by_microbatch_costs_no_operations() -> None:
    most = counted(1, None).num_operations  # the ReLU and the addition are in the batch norm before them
    assert counted(1, "microbatch").num_operations <= most
    few, many, local = counted(2, "microbatch"), counted(8, "microbatch"), counted(8, "local")
    assert few.num_operations == many.num_operations <= most and local.num_operations <= most
    assert few.num_dispatched == many.num_dispatched
    for seen in (few, many, local):
        assert not seen.synchronizations and not seen.uploads, lines(seen.synchronizations + seen.uploads)


def test_batch_norm_over_all_ranks_takes_two_operations_and_a_message_each_way() -> None:
    alone, without, all_ranks = counted(1, None), counted(8, "local"), counted(8, "sync")
    layers, ways = 20, ("channel_moments", "normalize_shared", "shared_gradient_sums", "shared_input_gradient")
    assert [all_ranks.operations[way] for way in ways] == [layers] * 4
    assert all_ranks.num_operations <= 1.05 * alone.num_operations
    messages = all_ranks.collectives.total() - without.collectives.total()
    assert messages == 2 * (layers - 3) - 1  # three layers beside a block share those of its last one
    assert not all_ranks.synchronizations and not all_ranks.uploads


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


def test_an_update_of_the_trainer_waits_for_nothing() -> None:
    recipe = load_recipe("default", ["model.name=alexnet-cifar", "data.path=none", "batch=64", "microbatch=8"])
    division = divide((8,) * 8, 4)
    passes = division.passes(merge=2)
    pictures = SimpleNamespace(mean=(0.5,) * 3, std=(0.2,) * 3, classes=list("0123456789"))
    with fake_ranks(4), FakeGpu() as gpu:
        model, example = gpu.take(models.create("alexnet-cifar")), gpu.take(torch.rand(8, 3, 32, 32))
        plan, method = Plan.parse("sample=4"), Method()
        network = TrainedNetwork(model, plan, example, batch_norm="microbatch", seed=0, method=method)
        network.divide(division, len(passes))
        state = RunState(network, create_optimizer(model, recipe.optimizer, 0.1), Scaler(gpu.device, "fp32"))
        pipeline = InputPipeline(cast(DataSet, pictures), gpu.device, torch.contiguous_format)
        schedule = cast(Schedule, SimpleNamespace(lr=lambda update: 0.1))
        step = TrainingStep(recipe, state, pipeline, schedule, passes, rank=0, reseed=False)
        images, labels = torch.zeros(16, 3, 32, 32, dtype=torch.uint8), torch.zeros(16, dtype=torch.int64)
        batch = Batch(images, labels, torch.arange(16))
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
        return self.last(F.interpolate(y, size=x.shape[2:], mode="bilinear"))


PLANS = ("sample=4", "filter=4", "height=4", "owt=4", "sample=2,filter=2", "height=2,width=2")
SLOW: list[tuple[Callable[[], nn.Module], tuple[str, ...]]] = [
    (small_nets.Dense, ("height=4", "sample=2,filter=2")),
    (small_nets.Shuffle, ("sample=4", "sample=2,filter=2")),
    (small_nets.Permuted, ("height=2,width=2", "filter=4")),
    (small_nets.Dropping, ("owt=4", "height=4")),
    (lambda: models.create("alexnet-cifar"), ("owt=4", "height=2,width=2")),
]


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


@pytest.mark.parametrize(
    "cases",
    [[(Resized, PLANS), (small_nets.Shuffle, ("filter=4",))], pytest.param(SLOW, marks=pytest.mark.slow)],
    ids=["quick", "slow"],
)
def test_no_pass_waits_for_the_gpu_or_gives_it_lists(
    cases: list[tuple[Callable[[], nn.Module], tuple[str, ...]]],
) -> None:
    for net, plans in cases:
        for plan in plans:
            seen, uploads = third_pass(net, plan)
            assert not seen.synchronizations, (plan, lines(seen.synchronizations))
            assert not uploads, (plan, lines(uploads))
            assert seen.operations["convolution"] == seen.operations["convolution_backward"] > 0
            assert seen.collectives.total() > 0


def test_lists_that_are_copied_in_every_pass_and_sizes_told_over_the_gpu_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def anew(self: Constants, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.as_tensor(self._numbers, dtype=dtype or x.dtype, device=x.device)

    def over_the_gpu(numbers: Any, group: Any) -> list[list[int]]:
        mine = torch.tensor(list(numbers), device=FakeGpu.device)
        rows: list[list[int]] = collectives.all_gather(mine, group).tolist()
        return [list(numbers)] * len(rows)  # what is read there is zero

    with monkeypatch.context() as patched:
        patched.setattr(Constants, "like", anew)
        seen, uploads = third_pass(Resized, "height=4")
        assert len(seen.synchronizations) == len(uploads) >= 3
    monkeypatch.setattr(agreement, "gather_ints", over_the_gpu)
    seen, uploads = third_pass(Resized, "sample=4")
    assert (len(seen.synchronizations), len(uploads)) == (2, 1)
