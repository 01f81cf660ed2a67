"""What batch norm adds to the operations of a whole network on a GPU, beside the plain network's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from measuring.dispatch import Counts, FakeGpu, fake_ranks, lines
from torch import nn

from convoy import models
from convoy.engine import prepare
from convoy.plans.plan import Plan
from convoy.training.division import divide
from convoy.training.parallel import Method, ParallelNetwork

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

MICROBATCH, OWN, PIXELS = 2, 4, 32
"""Samples of a microbatch, microbatches of a rank, and how large the images are."""


def seen_of(gpu: FakeGpu, run: Any) -> Counts:
    """Of the second update: the first copies what stays."""
    run(0)
    with gpu.count() as seen:
        run(1)
    return seen


def plain(name: str) -> Counts:
    with FakeGpu() as gpu:
        net: nn.Module = gpu.take(models.create(name))
        images = gpu.take(torch.rand(MICROBATCH * OWN, 3, PIXELS, PIXELS))
        labels = gpu.take(torch.zeros(len(images), dtype=torch.int64))
        return seen_of(gpu, lambda update: F.cross_entropy(net(images), labels).backward())


def on_one_device(name: str) -> Counts:
    with FakeGpu() as gpu:
        net: nn.Module = gpu.take(models.create(name))
        context = prepare(net, 0, "microbatch")
        images = gpu.take(torch.rand(MICROBATCH * OWN, 3, PIXELS, PIXELS))
        labels = gpu.take(torch.zeros(len(images), dtype=torch.int64))

        def run(update: int) -> None:
            context.enter(update, 0, (MICROBATCH,) * OWN, gpu.device)
            F.cross_entropy(net(images), labels).backward()

        return seen_of(gpu, run)


def on_ranks(name: str, ranks: int, batch_norm: Any) -> Counts:
    division = divide((MICROBATCH,) * OWN * ranks, ranks)
    (piece,) = division.passes(OWN)
    with fake_ranks(ranks), FakeGpu() as gpu:
        example = gpu.take(torch.rand(MICROBATCH, 3, PIXELS, PIXELS))
        model = gpu.take(models.create(name))
        network = ParallelNetwork(
            model, Plan.parse(f"sample={ranks}"), example, batch_norm=batch_norm, seed=0, method=Method()
        )
        images = gpu.take(torch.rand(MICROBATCH * OWN, 3, PIXELS, PIXELS))
        labels = gpu.take(torch.zeros(len(images), dtype=torch.int64))

        def run(update: int) -> None:
            network.enter(update, piece)
            F.cross_entropy(network.forward(images), labels).backward()
            network.finish_update()

        return seen_of(gpu, run)


@pytest.mark.slow
def test_microbatches_cost_no_operations() -> None:
    name = "resnet18"
    most = 1.2 * plain(name).num_operations
    assert on_one_device(name).num_operations <= most
    few, many = on_ranks(name, 2, "microbatch"), on_ranks(name, 8, "microbatch")
    assert few.num_operations == many.num_operations <= most
    assert few.num_dispatched == many.num_dispatched
    local = on_ranks(name, 8, "local")
    assert local.num_operations <= most
    for seen in (few, many, local):
        assert not seen.synchronizations and not seen.uploads, lines(seen.synchronizations + seen.uploads)


def test_a_layer_over_all_ranks_takes_three_operations_more() -> None:
    without, all_ranks = on_ranks("resnet18", 8, "local"), on_ranks("resnet18", 8, "sync")
    layers = all_ranks.operations["normalize_shared"]
    more = all_ranks.num_operations - without.num_operations
    messages = all_ranks.collectives.total() - without.collectives.total()
    assert layers == 20
    assert more + messages <= 3 * layers
    assert not all_ranks.synchronizations, lines(all_ranks.synchronizations)
    assert not all_ranks.uploads, lines(all_ranks.uploads)
