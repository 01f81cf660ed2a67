"""Costs from five numbers, for where nothing was measured: a roofline for calls, α-β for messages.

Williams, Waterman and Patterson, "Roofline" (2009); Hockney, "The communication challenge for MPP" (1994).
"""

import math
from dataclasses import dataclass

from convoy.graph.graph import Call, Value
from convoy.ops.memory import predict_memory
from convoy.plans.layout import Layout
from convoy.plans.mesh import Mesh
from convoy.plans.place import PlacedCall, Placement
from convoy.plans.traffic import all_reduce_elements
from convoy.plans.transfer import Step


@dataclass(frozen=True)
class Analytic:
    """Seconds on rank 0, which has most where shares are unequal. It serves `convoy.planner.search` as its `Costs`."""

    flops: float = 5e13  # floating point operations a second
    bandwidth: float = 1e12  # bytes of memory a second
    overhead: float = 5e-6  # seconds of every call
    latency: float = 2e-5  # seconds of every message
    rate: float = 2e10  # bytes a second between neighbours, three times as many as over the first of several axes
    passes: int = 1  # in an update

    def context(self, call: Call) -> None:
        """All is in the call."""

    def compute(self, placed: PlacedCall, placement: Placement) -> float:
        """A roofline."""
        graph, mesh = placement.graph, placement.mesh
        layouts = {**placed.placed.inputs, **placed.placed.outputs}
        shapes = {name: _local(layout, graph.shape(name), mesh) for name, layout in layouts.items()}
        work = 0
        if placed.call.op in ("conv", "linear"):
            output = shapes[placed.call.outputs[0]]
            rows = output[2:] if placed.call.op == "conv" else output[1:-1]
            work = 6 * output[0] * math.prod(rows) * math.prod(shapes[placed.call.attributes["weight"]])
        moved = 12 * sum(map(math.prod, shapes.values()))
        return self.passes * (self.overhead + work / self.flops + moved / self.bandwidth)

    def transfer(self, step: Step, mesh: Mesh, shape: tuple[int, ...], itemsize: int, differentiable: bool) -> float:
        """Latency and bytes of every message."""
        count = mesh.size(step.axes)
        before, after = (math.prod(_local(layout, shape, mesh)) for layout in (step.source, step.target))
        scattered = (count - 1) * after
        forward = {"gather": (count - 1) * before, "move": after, "reduce_scatter": scattered}.get(step.kind, 0)
        backward = {"slice": scattered, "move": after, "reduce_scatter": scattered}.get(step.kind, 0)
        summed = all_reduce_elements(before, count)
        forward, backward = forward + summed * (step.kind == "reduce"), backward + summed * (step.kind == "copy")
        slower = 3 if 0 in step.axes and len(mesh.sizes) > 1 else 1
        numbers = [forward] + [backward] * differentiable
        return self.passes * sum(self.latency + n * itemsize * slower / self.rate for n in numbers if n)

    def laid_out(self, placed: PlacedCall, placement: Placement) -> float:
        return 0.0

    def joining(self, placed: PlacedCall, placement: Placement, part: float) -> float:
        """The gradients are added to none."""
        names = [placed.call.attributes[role] for role in ("weight", "bias") if placed.call.attributes[role]]
        graph, layouts = placement.graph, placement.layouts
        once = sum(self.adding(graph.values[name], layouts[name], placement.mesh) for name in names)
        return (self.passes - 1) * once

    def gradient(self, parameter: Value, layout: Layout, mesh: Mesh) -> float:
        """An all-reduce by itself."""
        axes = tuple(sorted(layout.copied))
        if not axes:
            return 0.0
        sent = all_reduce_elements(math.prod(_local(layout, parameter.shape, mesh)), mesh.size(axes))
        return self.latency + sent * parameter.dtype.itemsize / self.rate

    def adding(self, parameter: Value, layout: Layout, mesh: Mesh) -> float:
        """Two gradients are read and one is written."""
        return 12 * math.prod(_local(layout, parameter.shape, mesh)) / self.bandwidth

    def update(self, parameter: Value, layout: Layout, mesh: Mesh) -> float:
        """Weights, gradients and momentum are read and written."""
        return 20 * math.prod(_local(layout, parameter.shape, mesh)) / self.bandwidth

    def parameter_memory(self, parameter: Value, layout: Layout, mesh: Mesh) -> float:
        """Weights, gradients and momentum."""
        return 3.0 * math.prod(_local(layout, parameter.shape, mesh)) * parameter.dtype.itemsize

    def workspace(self, placed: PlacedCall, placement: Placement) -> float:
        return 0.0

    def memory(self, placement: Placement) -> float:
        """As predicted, and momentum."""
        return max(each.total + each.parameters for each in predict_memory(placement))


def _local(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    return layout.local_shape(shape, mesh, (0,) * len(mesh.sizes))
