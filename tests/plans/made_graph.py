"""Small graphs made by hand, so that plans are tested without capture."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from convoy.graph.graph import Call, Graph, Ref, Value
from convoy.ops import place, work
from convoy.plans.layout import balanced
from convoy.plans.place import Batch, Placement, sample_axes
from convoy.plans.plan import Plan
from convoy.plans.stages import StagedGraph, Stages


class Chain:
    """Builds a graph call by call; each call takes the last result."""

    def __init__(self, *shape: int, training: bool = True) -> None:
        self.values = {"x": Value("x", shape, torch.float32, "input")}
        self.calls: list[Call] = []
        self.last = "x"
        self.training = training

    def conv(
        self, layer: str, channels: int, kernel: int = 3, stride: int = 1, groups: int = 1, padding: int | None = None
    ) -> "Chain":
        shape = self.values[self.last].shape
        dims = len(shape) - 2
        padding = kernel // 2 if padding is None else padding
        out = [(size + 2 * padding - kernel) // stride + 1 for size in shape[2:]]
        weight = self._parameter(f"{layer}.weight", channels, shape[1] // groups, *[kernel] * dims)
        bias = self._parameter(f"{layer}.bias", channels)
        attributes = {
            "input": self.last,
            "weight": weight,
            "bias": bias,
            "stride": (stride,) * dims,
            "padding": ((padding, padding),) * dims,
            "dilation": (1,) * dims,
            "groups": groups,
            "transposed": False,
            "output_padding": (0,) * dims,
        }
        return self.call(layer, "conv", F.conv2d, (shape[0], channels, *out), (self.last, weight, bias), attributes)

    def linear(self, layer: str, features: int) -> "Chain":
        shape = self.values[self.last].shape
        weight = self._parameter(f"{layer}.weight", features, shape[-1])
        bias = self._parameter(f"{layer}.bias", features)
        attributes = {"input": self.last, "weight": weight, "bias": bias}
        return self.call(layer, "linear", F.linear, (*shape[:-1], features), (self.last, weight, bias), attributes)

    def relu(self, layer: str) -> "Chain":
        return self.call(layer, "elementwise", F.relu, self.values[self.last].shape, (self.last,), {})

    def flatten(self, layer: str = "") -> "Chain":
        shape = self.values[self.last].shape
        flat = (shape[0], torch.Size(shape[1:]).numel())
        return self.call(layer, "reshape", torch.flatten, flat, (self.last,), {"input": self.last})

    def strange(self, layer: str) -> "Chain":
        return self.call(layer, "opaque", torch.cumsum, self.values[self.last].shape, (self.last,), {})

    def call(
        self, layer: str, op: str, function: Any, shape: tuple[int, ...], inputs: tuple[str, ...], attributes: dict
    ) -> "Chain":
        name = f"{layer or 'net'}_{len(self.calls)}"
        self.values[name] = Value(name, shape, torch.float32)
        refs = tuple(map(Ref, inputs))
        self.calls.append(Call(name, layer, op, function, refs, {}, inputs, (name,), Ref(name), attributes))
        self.last = name
        return self

    def graph(self) -> Graph:
        return Graph(tuple(self.calls), self.values, ("x",), Ref(self.last), {}, self.training)

    def _parameter(self, name: str, *shape: int) -> str:
        self.values[name] = Value(name, shape, torch.float32, "parameter")
        return name


def small_net(samples: int = 8) -> Graph:
    """Two convolutions and two linear layers."""
    chain = Chain(samples, 3, 16, 16).conv("features.0", 8).relu("features.1").conv("features.2", 12, stride=2)
    return (
        chain.relu("features.3")
        .flatten()
        .linear("classifier.0", 20)
        .relu("classifier.1")
        .linear("classifier.2", 10)
        .graph()
    )


def same_net() -> nn.Module:
    """The network of `small_net` as a module."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, 2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(768, 20),
        nn.ReLU(),
        nn.Linear(20, 10),
    )


def in_stages(graph: Graph, plan: Plan | str) -> tuple[Placement, StagedGraph]:
    """A graph under a plan with stages, and the stages; even cuts are those of equal multiply-adds."""
    plan = Plan.parse(plan)
    placement = placed(graph, plan)
    assert plan.mesh.stage_axis is not None
    number = plan.mesh.sizes[plan.mesh.stage_axis]
    stages = Stages.of(graph, number, plan.stages, work(graph))
    return placement, StagedGraph(graph, tuple(placement.outputs), stages.of_calls(graph), number)


def placed(graph: Graph, plan: Plan | str) -> Placement:
    """A graph under a plan, its samples divided as evenly as can be."""
    plan = Plan.parse(plan)
    axes = sample_axes(((call.layer, call.op) for call in graph.calls), plan)
    batch = Batch(plan.mesh, axes, balanced(graph.shape("x")[0], plan.mesh.size(axes)))
    return place(graph, plan, batch, [graph.output.name])
