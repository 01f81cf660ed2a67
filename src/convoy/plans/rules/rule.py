"""What a rule is told of a call, and what it answers: the layouts in which the call takes and gives its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from convoy.graph.graph import Call, Graph
from convoy.plans.layout import Layout, Split, indices
from convoy.plans.mesh import Axes, Mesh


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
        others = tuple(axis for axis in self.axes if axis not in axes)
        origin = (0,) * len(self.mesh.sizes)
        parts = []
        for place in self.mesh.group(origin, axes):
            ranks = (self.mesh.index(other, self.axes) for other in self.mesh.group(place, others))
            parts.append(indices(sample for rank in ranks for sample in self.parts[rank]))
        return Split(axes, tuple(parts))


@dataclass(frozen=True)
class Situation:
    """A call in its place in the plan.

    Attributes:
        strategy: what the plan says of the call's layer, for each mesh axis.
        given: the layouts in which the calls before it give its inputs. Parameters, buffers and constants are not
            in it: they come in whatever layout the rule asks for.
    """

    graph: Graph
    mesh: Mesh
    batch: Batch
    call: Call
    strategy: tuple[str, ...]
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
    """What a rule decides.

    Attributes:
        inputs: the layout that the call asks for, for each of its inputs.
        outputs: the layout in which it gives each of its outputs.
        note: why the call runs whole on every rank although the plan says otherwise; empty where it does not.
    """

    inputs: dict[str, Layout]
    outputs: dict[str, Layout]
    note: str = field(default="")


Rule = Callable[[Situation], Placed]
