"""Predicted memory, beside what a real pass of torch keeps."""

import pytest
import torch
from torch import nn

import convoy
from convoy.engine.network import network_of
from convoy.models import create
from convoy.ops.memory import predict_memory
from convoy.planner.workload import workload_of
from convoy.plans.plan import Plan
from kept import kept_bytes
from plans.made_graph import placed, same_net, small_net
from ranks import run_ranks


def test_memory_is_that_of_a_real_pass() -> None:
    for precision in (None, torch.bfloat16):
        model = create("resnet18", num_classes=4)
        workload = workload_of(model, torch.randn(1, 3, 32, 32), 8, precision=precision)
        (memory,) = predict_memory(workload.place(Plan.parse("serial")))
        with torch.autocast("cpu", precision, enabled=precision is not None):
            assert memory.activations == pytest.approx(kept_bytes(model, torch.randn(8, 3, 32, 32)), rel=0.03)
    (memory,), model = predict_memory(placed(small_net(), "serial")), same_net()  # to the byte
    assert memory.parameters == memory.gradients == sum(4 * p.numel() for p in model.parameters())
    assert memory.activations == kept_bytes(model, torch.zeros(8, 3, 16, 16))
    assert predict_memory(placed(small_net(), "serial"), in_flight=3)[0].activations == 3 * memory.activations
    assert predict_memory(placed(small_net(), "sample=2"))[0].activations * 2 == memory.activations


def kept_under(plan: str) -> tuple[int, int]:
    """Bytes of activations of this rank in training, measured and predicted."""
    layers = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.MaxPool2d(3, 2, 1),
        nn.Dropout(),
        nn.AvgPool2d(3, 1, 1),
        nn.Conv2d(8, 8, 1),
    )
    images = torch.randn(2, 3, 16, 16)
    net = convoy.parallelize(nn.Sequential(*layers), plan, example=images)
    network = network_of(net)
    memory = predict_memory(network.example_placement(True))[network.groups.rank]
    return kept_bytes(net, images), memory.activations


def test_padded_copies_and_masks_are_kept_where_rows_are_divided() -> None:
    for plan in ("height=2", "width=2"):
        assert all(measured == predicted for measured, predicted in run_ranks(kept_under, 2, plan))
