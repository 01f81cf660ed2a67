"""How one tensor lies over the mesh."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod
from types import MappingProxyType

from convoy.plans.mesh import Axes, Mesh

Indices = range | tuple[int, ...]


def indices(numbers: Iterable[int]) -> Indices:
    """Indices in their canonical form: a range where they are consecutive."""
    ordered = tuple(numbers)
    if not ordered:
        return range(0)
    run = range(ordered[0], ordered[0] + len(ordered))
    return run if tuple(run) == ordered else ordered


@lru_cache(maxsize=1 << 12)
def balanced(total: int, parts: int) -> tuple[range, ...]:
    """Cut `total` into consecutive ranges as even as can be, the larger ones first."""
    size, larger = divmod(total, parts)
    return consecutive([size + (index < larger) for index in range(parts)])


def proportional(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in proportion to the weights that add up to `total`, by largest remainders; none is zero."""
    assert total >= len(weights) and min(weights) > 0
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    while sum(counts) < total:  # those that lost most by rounding first
        rank = min(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
        counts[rank] += 1
    while sum(counts) > total:  # where a small one was given its first
        rank = max((i for i in range(len(weights)) if counts[i] > 1), key=lambda i: (counts[i] - exact[i], i))
        counts[rank] -= 1
    return tuple(counts)


def consecutive(sizes: Sequence[int]) -> tuple[range, ...]:
    """Consecutive ranges of these sizes."""
    return tuple(range(start, end) for start, end in pairwise(accumulate(sizes, initial=0)))


def common(first: Indices, second: Indices) -> Indices:
    """Indices of both, in the order of the first."""
    if isinstance(first, range) and isinstance(second, range):
        start, stop = max(first.start, second.start), min(first.stop, second.stop)
        return range(start, stop) if start < stop else range(0)
    members = second if isinstance(second, range) else set(second)
    return indices(i for i in first if i in members)


def without(first: Indices, second: Indices) -> Indices:
    """Indices of the first that are not in the second."""
    if not len(common(first, second)):
        return first
    members = second if isinstance(second, range) else set(second)
    return indices(i for i in first if i not in members)


def united(parts: Iterable[Indices]) -> Indices:
    """Indices of any of the parts, ascending; those of one part, or of equal parts, in its order."""
    nonempty = [part for part in parts if len(part)]
    if all(part == nonempty[0] for part in nonempty):
        return nonempty[0] if nonempty else range(0)
    if all(isinstance(part, range) for part in nonempty):
        ranges = sorted((part[0], part[-1] + 1) for part in nonempty)
        stop = ranges[0][1]
        for first, last in ranges[1:]:
            if first > stop:
                break
            stop = max(stop, last)
        else:
            return range(ranges[0][0], stop)
    return indices(sorted({i for part in nonempty for i in part}))


@dataclass(frozen=True)
class Split:
    """A dimension that is divided over mesh axes. The parts of a tensor that a layer gives are disjoint and cover the
    dimension; those that a layer asks for may overlap."""

    axes: Axes  # ascending
    parts: tuple[Indices, ...]  # the global indices that each place on these axes holds, in the order of `Mesh.index`

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, computed once: there may be hundreds of parts, and layouts are looked up very often."""
        return hash((self.axes, self.parts))


@lru_cache(maxsize=1 << 14)
def even_split(axes: Axes, size: int, parts: int) -> Split:
    """A dimension cut into consecutive parts as even as can be; one object for all calls with the same arguments."""
    return Split(axes, balanced(size, parts))


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tensor are, axis by axis.

    On an axis that stands in none of the fields the tensor and its gradient are whole and identical on every rank.

    An activation [8, 10, 4, 4] on a mesh of 2 × 3 ranks, with the samples divided over the first axis and the channels
    over the second:

    >>> mesh = Mesh(("data", "model"), (2, 3))
    >>> layout = Layout.of({0: even_split((0,), 8, 2), 1: even_split((1,), 10, 3)})
    >>> layout.describe(mesh)
    'dim 0 over data, dim 1 over model'
    >>> layout.local_shape((8, 10, 4, 4), mesh, coordinates=(1, 2))
    (4, 3, 4, 4)
    >>> layout.parts(1, mesh, (1, 2), 10)  # the channels of that rank
    range(7, 10)

    Attributes:
        splits: tensor dimension to how it is divided.
        partial: axes over which the ranks' tensors must be added to give the tensor. Its gradient is whole.
        copied: axes on which the tensor is whole but each rank has only a share of its gradient, to be added over the
            axis. A layer asks for this where it does a part of the work with a whole tensor.
    """

    splits: tuple[tuple[int, Split], ...] = ()
    partial: frozenset[int] = field(default_factory=frozenset)
    copied: frozenset[int] = field(default_factory=frozenset)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.splits, self.partial, self.copied))

    @staticmethod
    def of(
        splits: Mapping[int, Split] | None = None, partial: Iterable[int] = (), copied: Iterable[int] = ()
    ) -> "Layout":
        """Build a layout from a mapping of dimensions."""
        pairs = tuple((splits or {}).items())
        return Layout(pairs if len(pairs) < 2 else tuple(sorted(pairs)), frozenset(partial), frozenset(copied))

    def split(self, dim: int) -> Split | None:
        """How a dimension is divided, or None where every rank has all of it."""
        return next((split for split_dim, split in self.splits if split_dim == dim), None)

    def parts(self, dim: int, mesh: Mesh, coordinates: Sequence[int], size: int) -> Indices:
        """The global indices of a dimension of `size` that the rank at `coordinates` holds."""
        split = self.split(dim)
        return range(size) if split is None else split.parts[mesh.index(coordinates, split.axes)]

    def local_shape(self, shape: Sequence[int], mesh: Mesh, coordinates: Sequence[int]) -> tuple[int, ...]:
        """Shape of what a rank holds of a tensor of the whole `shape`."""
        return tuple(len(self.parts(dim, mesh, coordinates, size)) for dim, size in enumerate(shape))

    def numel(self, shape: Sequence[int], mesh: Mesh, coordinates: Sequence[int]) -> int:
        """How many elements a rank holds of a tensor of the whole `shape`."""
        return prod(self.local_shape(shape, mesh, coordinates))

    @cached_property
    def split_axes(self) -> frozenset[int]:
        """All axes that divide some dimension."""
        return frozenset(axis for _, split in self.splits for axis in split.axes)

    def describe(self, mesh: Mesh, dims: Mapping[int, str] = MappingProxyType({})) -> str:
        """For people: `dim 1 over filter`, `partial over filter`, `whole`, …, dimensions by their names in `dims`."""
        axes = {dim: "·".join(mesh.names[axis] for axis in split.axes) for dim, split in self.splits}
        words = [f"{dims.get(dim, f'dim {dim}')} over {names}" for dim, names in axes.items()]
        words += [f"partial over {mesh.names[axis]}" for axis in sorted(self.partial)]
        return ", ".join(words) or "whole"


WHOLE = Layout()
