"""Cross-entropy over divided classes equals that of whole logits; nothing as large as the logits is sent."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import convoy
from convoy.comm.shared_memory import SWITCH
from ranks import run_ranks

CLASSES = 11


def build() -> nn.Module:
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(backbone, nn.Linear(6, CLASSES)).double()


def compare(plan, smoothing: float, batch: int) -> tuple[float, float]:
    """Worst difference of loss and gradients."""
    serial = build()
    net = convoy.parallelize(copy.deepcopy(serial), plan, example=torch.zeros(2, 3, 9, 9, dtype=torch.float64))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, 3, 9, 9, dtype=torch.float64, generator=generator)
    y = torch.randint(0, CLASSES, (batch,), generator=generator)
    mine = convoy.local_samples(net, batch)
    want = F.cross_entropy(serial(x), y, label_smoothing=smoothing)
    want.backward()
    got = convoy.cross_entropy(net, x[mine], y[mine], label_smoothing=smoothing)
    got.backward()
    gradients = convoy.gradients(net)
    worst = max((gradients[name] - p.grad).abs().max().item() for name, p in serial.named_parameters())
    return abs(got.item() - want.item()), worst


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "owt=2", "owt=3", "sample=2,filter=2", "channel=2"])
def test_equals_the_plain_loss(plan: str, smoothing: float) -> None:
    world = 4 if "," in plan else int(plan[-1])
    for loss, gradient in run_ranks(compare, world, plan, smoothing, 7):
        assert loss < 1e-12
        assert gradient < 1e-12


def count_bytes(plan: str, classes: int) -> int:
    """Elements that the largest message of a step carries."""
    os.environ[SWITCH] = "0"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, classes))
    net = convoy.parallelize(net, plan, example=torch.zeros(8, 4))
    largest = 0
    original = dist.isend

    def counting(tensor, *args, **kwargs):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.isend = counting
    try:
        convoy.cross_entropy(net, torch.randn(8, 4), torch.randint(0, classes, (8,))).backward()
    finally:
        dist.isend = original
    return largest


def test_messages_do_not_grow_with_the_classes() -> None:
    small, large = (run_ranks(count_bytes, 2, "owt=2", classes)[0] for classes in (100, 100_000))
    assert 0 < small == large
