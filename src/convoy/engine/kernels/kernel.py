"""What is known when a rank's version of a call is built."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from convoy.comm.groups import Groups
from convoy.engine.context import StepContext
from convoy.graph.graph import Call, Graph
from convoy.plans.layout import Indices, Layout
from convoy.plans.mesh import Coordinates, Mesh

Kernel = Callable[..., Sequence[Tensor]]
"""Takes the rank's tensors of `call.inputs`, in order, and gives those of `call.outputs`, in order."""


@dataclass(frozen=True)
class Alone:
    """A kernel that does more than compute: it talks to other ranks, or to the step's context. It is not compiled."""

    kernel: Kernel

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run it."""
        return self.kernel(*tensors)


@dataclass(frozen=True)
class Recorded:
    """A kernel of one output in two parts, of which the first only computes and can be compiled.

    Attributes:
        compute: takes the tensors of `call.inputs`; gives that of the output, and what is to be recorded.
        record: takes the tensors of some inputs and what is to be recorded.
        buffers: which inputs those are.
    """

    compute: Callable[..., tuple[Tensor, list[Tensor]]]
    record: Callable[[Sequence[Tensor], list[Tensor]], None]
    buffers: tuple[int, ...]

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run both parts."""
        y, terms = self.compute(*tensors)
        self.record([tensors[place] for place in self.buffers], terms)
        return [y]


@dataclass(frozen=True)
class Site:
    """A call on one rank.

    Attributes:
        layouts: of every input and output of the call, as its rule asked for them.
    """

    graph: Graph
    mesh: Mesh
    coordinates: Coordinates
    groups: Groups
    context: StepContext
    call: Call
    layouts: Mapping[str, Layout]

    def parts(self, name: str, dim: int) -> Indices:
        """The global indices of a dimension that this rank holds of a value."""
        return self.layouts[name].parts(dim, self.mesh, self.coordinates, self.graph.shape(name)[dim])

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Shape of what this rank holds of a value."""
        return self.layouts[name].local_shape(self.graph.shape(name), self.mesh, self.coordinates)

    def is_first(self, axes: Iterable[int]) -> bool:
        """Whether this rank is the first of its group over `axes`."""
        return all(self.coordinates[axis] == 0 for axis in axes)
