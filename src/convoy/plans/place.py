"""A network's calls on the mesh: what an operation decides for a call, and the placement of the network that
follows."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from convoy.graph.graph import Call, Graph
from convoy.plans.layout import WHOLE, Layout, Split, indices
from convoy.plans.mesh import Axes, Mesh
from convoy.plans.plan import Plan
from convoy.plans.transfer import Step

COMPUTE = ("conv", "linear")  # kinds of calls that a plan divides; all others follow


@dataclass(frozen=True)
class Batch:
    """How the samples of one forward pass are divided: `parts` are consecutive, over the plan's sample axes."""

    mesh: Mesh
    axes: Axes
    parts: tuple[range, ...]

    @property
    def num_samples(self) -> int:
        """Samples of the pass on all ranks."""
        return sum(map(len, self.parts))

    def split(self, axes: Axes) -> Split | None:
        """The samples over some of the sample axes: a rank then has those of all ranks along the others."""
        axes = tuple(sorted(axes))
        if axes not in self._splits:
            self._splits[axes] = self._split(axes)
        return self._splits[axes]

    @cached_property
    def _splits(self) -> dict[Axes, Split | None]:
        return {}

    def _split(self, axes: Axes) -> Split | None:
        if not axes:
            return None
        if axes == self.axes:
            return Split(axes, self.parts)
        other_axes = tuple(axis for axis in self.axes if axis not in axes)
        origin = (0,) * len(self.mesh.sizes)
        parts = []
        for place in self.mesh.group(origin, axes):
            ranks = (self.mesh.index(coordinates, self.axes) for coordinates in self.mesh.group(place, other_axes))
            parts.append(indices(sample for rank in ranks for sample in self.parts[rank]))
        return Split(axes, tuple(parts))


@dataclass(frozen=True)
class Situation:
    """A call in its place in the plan."""

    graph: Graph
    mesh: Mesh
    batch: Batch
    call: Call
    strategy: tuple[str, ...]  # of the call's layer, for each mesh axis
    # layouts in which earlier calls give its inputs; parameters, buffers and constants, which are not in it, come in
    # whatever layout the operation asks for
    given: Mapping[str, Layout]

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a value."""
        return self.graph.shape(name)

    def axes(self, *strategies: str) -> Axes:
        """The mesh axes on which the layer has one of these strategies."""
        return tuple(axis for axis, strategy in enumerate(self.strategy) if strategy in strategies)

    @cached_property
    def where(self) -> str:
        """How an error names the layer."""
        return f"layer {self.call.layer or self.call.name!r}"


@dataclass(frozen=True)
class Placed:
    """The decision of an operation for a call."""

    inputs: dict[str, Layout]  # the layout that the call asks for, by input
    outputs: dict[str, Layout]  # the layout in which it gives each output
    note: str = field(default="")  # why the call runs whole on every rank although the plan says otherwise; else empty


@dataclass(frozen=True)
class PlacedCall:
    """A call, how it is divided, and how its inputs get there."""

    call: Call
    strategy: tuple[str, ...]  # of its layer, one for each mesh axis
    placed: Placed
    # for every input that is not where the call wants it, the steps from where it is
    transfers: dict[str, tuple[Step, ...]]


@dataclass(frozen=True)
class Placement:
    """A network on a mesh: the layout of every tensor, and the communication between calls.

    >>> from torch import nn
    >>> graph = capture(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 10)), [(4, 3, 2, 2)])
    >>> plan = Plan.parse({"mesh": {"gpu": 2}, "layers": {"1": {"gpu": "filter"}, "3": {"gpu": "channel"}}})
    >>> placement = place(graph, plan, Batch(plan.mesh, (), (range(4),)), [graph.output.name])
    >>> for call in placement.calls:  # a filter layer before a channel layer: one sum, at the end
    ...     print(call.call.layer, call.strategy, placement.layouts[call.call.outputs[0]].describe(plan.mesh))
    0 ('replicate',) whole
    1 ('filter',) dim 1 over gpu
    2 ('replicate',) dim 1 over gpu
    3 ('channel',) partial over gpu
    >>> [step.kind for step in placement.outputs[graph.output.name]]
    ['reduce']

    Attributes:
        layouts: where every value is kept; a parameter's `copied` axes are those over which its gradient is added.
        outputs: for each of the network's outputs, the steps to the samples of its rank.
        held: of a stage, the values that it receives and sends, which it keeps until its backward pass.
    """

    graph: Graph
    mesh: Mesh
    batch: Batch
    calls: tuple[PlacedCall, ...]
    layouts: dict[str, Layout]
    outputs: dict[str, tuple[Step, ...]]
    output_layouts: dict[str, Layout]
    held: tuple[str, ...] = ()

    @property
    def is_part(self) -> bool:
        """Whether these are the calls of one stage of the network."""
        return len(self.calls) < len(self.graph.calls)

    def local_shape(self, name: str, rank: int) -> tuple[int, ...]:
        """The shape of a rank's part of a value, as it is kept."""
        layout = self.layouts.get(name, WHOLE)
        return layout.local_shape(self.graph.shape(name), self.mesh, self.mesh.coordinates(rank))

    def local_bytes(self, name: str, rank: int) -> int:
        """Bytes of a rank's part of a value."""
        return math.prod(self.local_shape(name, rank)) * self.graph.values[name].dtype.itemsize


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    buffers: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.buffers + self.activations


def sample_axes(layers: Iterable[tuple[str, str]], plan: Plan) -> tuple[int, ...]:
    """The axes on which some of the layers, each with its name and op, is divided by samples: each rank is given the
    samples of its place on them."""
    strategies = [plan.strategy(layer, op) for layer, op in layers if op in COMPUTE]
    return tuple(axis for axis in plan.mesh.axes if any(strategy[axis] == "sample" for strategy in strategies))


def own_samples(shape: tuple[int, ...], batch: Batch) -> Layout:
    """The layout of a network's output: each rank has its own samples. A value that belongs to no sample every rank
    has, but the gradient that it gives is only its share."""
    samples = batch.split(batch.axes)
    if samples is None:
        return WHOLE
    return Layout.of({0: samples}) if shape and shape[0] == batch.num_samples else Layout.of(copied=batch.axes)
