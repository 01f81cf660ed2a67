"""What batch norm adds to the operations of a whole network on a GPU, beside the plain network's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from measuring.dispatch import Counts, FakeGpu, fake_ranks, lines
from torch import nn

from convoy import models
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


def on_ranks(name: str, ranks: int, batch_norm: Any) -> Counts:
    plan = Plan.parse(f"sample={ranks}" if ranks > 1 else "serial")
    division = divide((MICROBATCH,) * OWN * ranks, ranks)
    (piece,) = division.passes(OWN)
    with fake_ranks(ranks), FakeGpu() as gpu:
        example = gpu.take(torch.rand(MICROBATCH, 3, PIXELS, PIXELS))
        model = gpu.take(models.create(name))
        network = ParallelNetwork(model, plan, example, batch_norm=batch_norm, seed=0, method=Method())
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
    most = plain(name).num_operations  # the ReLU and the addition are in the batch norm before them
    assert on_ranks(name, 1, "microbatch").num_operations <= most
    few, many = on_ranks(name, 2, "microbatch"), on_ranks(name, 8, "microbatch")
    assert few.num_operations == many.num_operations <= most
    assert few.num_dispatched == many.num_dispatched
    local = on_ranks(name, 8, "local")
    assert local.num_operations <= most
    for seen in (few, many, local):
        assert not seen.synchronizations and not seen.uploads, lines(seen.synchronizations + seen.uploads)


def test_a_layer_over_all_ranks_takes_two_operations_and_a_message_each_way() -> None:
    alone, without, all_ranks = plain("resnet18"), on_ranks("resnet18", 8, "local"), on_ranks("resnet18", 8, "sync")
    layers, ways = 20, ("channel_moments", "normalize_shared", "shared_gradient_sums", "shared_input_gradient")
    assert [all_ranks.operations[way] for way in ways] == [layers] * 4
    assert all_ranks.num_operations <= 1.05 * alone.num_operations
    messages = all_ranks.collectives.total() - without.collectives.total()
    assert messages == 2 * (layers - 3) - 1  # three layers beside a block share those of its last one
    assert not all_ranks.synchronizations, lines(all_ranks.synchronizations)
    assert not all_ranks.uploads, lines(all_ranks.uploads)
