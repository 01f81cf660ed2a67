"""Graphs of a few layers, and their placements."""

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from convoy.graph.graph import Graph
from convoy.ops import capture, place
from convoy.plans.layout import balanced
from convoy.plans.place import Batch, Placement, sample_axes
from convoy.plans.plan import Plan


class Does(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Small(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, padding=1), nn.ReLU()
        self.features = nn.Sequential(*convolutions)
        self.classifier = nn.Sequential(nn.Linear(768, 20), nn.ReLU(), nn.Linear(20, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def same_net() -> nn.Module:
    """The network of `small_net`, one layer after another."""
    small = Small()
    return nn.Sequential(*small.features, nn.Flatten(), *small.classifier)


def graph_of(model: nn.Module, *shape: int, training: bool = True, dtype: torch.dtype = torch.float32) -> Graph:
    """The graph of a network that takes one tensor."""
    return capture(model, (torch.empty(shape, device="meta", dtype=dtype),), training=training)


def chain(shape: tuple[int, ...], training: bool = True, **layers: nn.Module) -> Graph:
    """The graph of layers by their names, one after another."""
    return graph_of(nn.Sequential(OrderedDict(layers)), *shape, training=training)


@cache
def small_net(samples: int = 8) -> Graph:
    """The graph of `Small` in training."""
    return graph_of(Small(), samples, 3, 16, 16)


def placed(graph: Graph, plan: Any) -> Placement:
    """A graph under a plan, its samples divided as evenly as can be."""
    plan = Plan.parse(plan)
    axes = sample_axes(((call.layer, call.op) for call in graph.calls), plan)
    batch = Batch(plan.mesh, axes, balanced(graph.shape(graph.inputs[0])[0], plan.mesh.size(axes)))
    return place(graph, plan, batch, [graph.output.name])
