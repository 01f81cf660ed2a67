"""A small network, its data, and loops over it of one's own, on one device and on several."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy

IMAGES = torch.randn(8, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
PLANS = ["sample=2", "filter=2", "owt=2", "height=2"]


def small() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()
    return nn.Sequential(*first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)).double()


def ranks_net(plan: str, **options: Any) -> tuple[nn.Sequential, slice]:
    net: nn.Sequential = convoy.parallelize(small(), plan, IMAGES[:4], **options)
    return net, convoy.local_samples(net, len(IMAGES))


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def world_of(plan: str) -> int:
    return 1 if plan == "serial" else 4 if "," in plan else 2


def loss_of(net: nn.Module, mine: slice) -> Tensor:
    images = IMAGES[mine].to(next(net.parameters()).dtype)
    return F.cross_entropy(net(images), LABELS[mine])


def far(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return max(((got[name] - want[name]).abs().max() / want[name].abs().max()).item() for name in want)


def train(net: nn.Module, mine: slice, clip: Callable[..., Any] | None, updates: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    norms = []
    for _ in range(updates):
        optimizer.zero_grad()
        loss_of(net, mine).backward()
        if clip is not None:
            norms.append(float(clip(list(net.parameters()))))
        optimizer.step()
    return norms
