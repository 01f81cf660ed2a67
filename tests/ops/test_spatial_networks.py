"""Small networks of pooling, resizing, padding, slices and chunks on real processes against the plain network."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.plans.windows import Need, Window, halo_split
from ranks import run_ranks


class Pools(nn.Module):
    """Pooling of every kind, down to one number a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 5, 3, padding=1)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.first(x)), 3, 2, 1)
        x = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False) + F.avg_pool2d(x, 3, 1, 1, ceil_mode=True)
        x = F.adaptive_max_pool2d(torch.relu(self.second(x)), 4) + F.adaptive_avg_pool2d(x[:, 1:], 4)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Hourglass(nn.Module):
    """Down, up again, and beside what was before; padded and cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.low = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.last = nn.Conv2d(10, 4, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        y = torch.relu(self.low(F.max_pool2d(x, 2)))
        y = F.interpolate(y, scale_factor=2, mode="bilinear") + F.interpolate(y, size=x.shape[2:], mode="nearest")
        z = self.last(F.pad(torch.cat([x, y], 1), (0, 1, 0, 1)))
        return torch.cat([z[:, ::2, 1:-1].amax(3).mean(2), z[:, 1::2].sum((2, 3))], 1)


NETWORKS = {network.__name__: network for network in (Pools, Hourglass)}


def difference(name: str, plan: str) -> float:
    """The largest error of outputs and gradients on this rank, relative to the plain network's."""
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    plain = NETWORKS[name]()
    images, weights = torch.randn(5, 3, 16, 12), torch.randn(5, 4)
    samples = 3 if "sample" in plan else 5
    net = convoy.parallelize(copy.deepcopy(plain), plan, example=images[:samples])
    y = plain(images)
    (y * weights).sum(1).mean().backward()
    own = convoy.local_samples(net, 5)
    found = net(images[own])
    (found * weights[own]).sum(1).mean().backward()
    gradients = convoy.gradients(net)
    pairs = [(found, y[own]), *((gradients[key], parameter.grad) for key, parameter in plain.named_parameters())]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def sabotaged(name: str, plan: str) -> float:
    right = Window.needed
    Window.needed = _without_neighbours  # type: ignore[method-assign]
    halo_split.cache_clear()
    try:
        return difference(name, plan)
    finally:
        Window.needed = right  # type: ignore[method-assign]
        halo_split.cache_clear()


def _without_neighbours(self: Window, output: range) -> Need:
    """Padding at the borders between ranks, where the neighbours' rows should be."""
    start, stop = output[0] * self.stride - self.before, output[-1] * self.stride - self.before + self.span
    rows = range(max(0, output[0] * self.stride), min(self.size, (output[-1] + 1) * self.stride))
    return Need(rows, max(0, rows.start - start), max(0, stop - rows.stop))


PLANS = [("Pools", "height=2,width=2"), ("Hourglass", "sample=2,height=2"), ("Hourglass", "channel=2,width=2")]


def differences() -> list[float]:
    return [difference(*pair) for pair in PLANS]


def test_networks_are_those_of_one_device() -> None:
    for pair, *errors in zip(PLANS, *run_ranks(differences, 4, timeout=120), strict=True):
        assert max(errors) < 1e-10, pair


def test_padding_between_ranks_would_be_noticed() -> None:
    assert max(run_ranks(sabotaged, 2, "Hourglass", "height=2", timeout=120)) > 1e-3
