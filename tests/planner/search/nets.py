"""Networks of few layers with the joins that make a search hard, and every plan of one priced by itself."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.errors import ConvoyError
from convoy.hardware.catalog import Hop
from convoy.planner.cost.additive import Additive, sums_of_calls
from convoy.planner.cost.costs import Costs, Roofline, Update
from convoy.planner.cost.link import assumed
from convoy.planner.search.prices import CHOOSING, Strategy
from convoy.planner.workload import Workload, workload_of
from convoy.plans.buckets import Sizes
from convoy.plans.mesh import Mesh
from convoy.plans.place import Placement

ONE, THREE, TWO = Mesh(("gpu",), (2,)), Mesh(("gpu",), (3,)), Mesh(("node", "gpu"), (2, 2))
FEW = ("sample", "filter", "channel", "height")


def costs(flops: float = 1e9, memory: float = 1e11, latency: float = 1e-5, rate: float = 3e8) -> Costs:
    """Of a slow device, with links between those where computing and those where sending decides, three times as fast
    between neighbours. Each gradient travels alone."""
    links = assumed(Hop(latency, rate / 3), Hop(latency, rate), per_host=2, overlap=False)
    return Costs(Roofline(flops, memory, 2e-6), links, Update(5 / memory), sizes=Sizes(1, 1, 1))


# under which the best plans are mixed
COSTS = costs()
EVERY = (COSTS, costs(flops=3e8, rate=1e8, latency=1e-6, memory=1e10), costs(flops=1e10, rate=5e7, latency=1e-6))


@dataclass
class EachLayer:
    """A strategy for every layer, as a plan."""

    mesh: Mesh
    layers: Mapping[str, Strategy]

    def strategy(self, layer: str, op: str) -> Strategy:
        return self.layers.get(layer, ("replicate",) * len(self.mesh.sizes))

    def pattern(self, layer: str) -> str:
        return layer


def seconds_of(workload: Workload, placement: Placement, costs: Costs) -> float:
    return additive_seconds(placement, Additive(costs, workload.graph, workload.passes))


def additive_seconds(placement: Placement, costs: Additive) -> float:
    """The sum that the search makes least, over a network as it is placed."""
    return sum(seconds + sum(of.seconds for of in parts.values()) for seconds, parts in sums_of_calls(placement, costs))


def every_placement(
    workload: Workload, mesh: Mesh, among: Sequence[str], fixed: Mapping[str, Sequence[Strategy]] = {}
) -> Iterator[tuple[dict[str, Strategy], Placement]]:
    """Every plan that can be placed, by the strategies of its layers; some layers have but those that are fixed."""
    layers = dict.fromkeys(call.layer for call in workload.graph.calls if call.op in CHOOSING)
    free = list(itertools.product(among, repeat=len(mesh.sizes)))
    for strategies in itertools.product(*(fixed.get(layer, free) for layer in layers)):
        by_layer = dict(zip(layers, strategies, strict=True))
        try:
            yield by_layer, workload.place(EachLayer(mesh, by_layer))
        except ConvoyError:
            continue


class Chain(nn.Module):
    """Two convolutions, pooling, flatten, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
        self.fc = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.max_pool2d(self.features(x), 2).flatten(1))


class Residual(nn.Module):
    """Two residual blocks, the second with a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block1 = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.block2 = nn.Sequential(nn.Conv2d(8, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12))
        self.project = nn.Conv2d(8, 12, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(x + self.block1(x))
        x = F.relu(self.block2(x) + self.project(x))
        return x.mean((2, 3))


class Branches(nn.Module):
    """Two or three branches that all take the same tensor, and its maxima, concatenated."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.ways = nn.ModuleList(nn.Conv2d(4, 4 + 2 * i, 1) for i in range(count))
        self.last = nn.Conv2d(sum(4 + 2 * i for i in range(count)) + 4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        ways = [F.relu(way(x)) for way in self.ways]
        return self.last(torch.cat([*ways, F.max_pool2d(x, 3, 1, 1)], 1))


class Nested(nn.Module):
    """A concatenation of a concatenation, added to what it came from."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.c, self.d = nn.Conv2d(8, 4, 1), nn.Conv2d(12, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        first = torch.cat([a, self.b(a)], 1)
        second = torch.cat([self.c(first), first], 1)
        return (self.d(second) + first).flatten(1)


class Twice(nn.Module):
    """One layer called twice, and one whose weight another one uses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.again = nn.Conv2d(8, 8, 3, padding=1)
        self.tied = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.tied.weight = self.again.weight
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.again(F.relu(self.again(self.stem(x)))))
        return self.fc(self.tied(x).mean((2, 3)))


def workload(model: nn.Module, samples: int = 8, size: int = 8, **options: Any) -> Workload:
    """A training pass."""
    return workload_of(model, torch.empty(1, 3, size, size), samples * options.get("passes", 1), **options)
