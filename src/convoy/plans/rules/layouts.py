"""Small constructions on layouts that several rules share."""

from collections.abc import Iterable, Mapping

from convoy.plans.layout import Layout, Split, even_split
from convoy.plans.mesh import Mesh


def without_partial(layout: Layout) -> Layout:
    """The layout after its partial sums have been added up."""
    return Layout(layout.splits, frozenset(), frozenset())


def even(mesh: Mesh, axes: Iterable[int], size: int) -> Split:
    """A dimension cut into consecutive parts as even as can be, the first axis being the coarsest."""
    axes = tuple(sorted(axes))
    return even_split(axes, size, mesh.size(axes))


def put(splits: dict[int, Split], dim: int, split: Split | None) -> None:
    """Note a split, if there is one."""
    if split is not None and split.axes:
        splits[dim] = split


def operand(
    target: Mapping[int, Split], out_shape: tuple[int, ...], shape: tuple[int, ...], keep: Iterable[int] = ()
) -> Layout:
    """What an operand that broadcasts to `out_shape` must look like where the result is split as in `target`.

    It is split alike where it has the dimension; where it is broadcast, every rank needs it for its part of the work,
    so that its gradient is shared out over the axes.

    Args:
        target: splits of the result, by dimension of the result.
        out_shape: shape of the result.
        shape: the operand's own shape, aligned with the result's last dimensions.
        keep: axes over which the operand stays partial.
    """
    offset = len(out_shape) - len(shape)
    splits: dict[int, Split] = {}
    copied: set[int] = set()
    for dim, split in target.items():
        own = dim - offset
        if own >= 0 and shape[own] == out_shape[dim]:
            splits[own] = split
        else:
            copied |= set(split.axes)
    return Layout.of(splits, partial=keep, copied=copied)


def is_balanced(split: Split, size: int) -> bool:
    """Whether no part is much larger than its even share, so that following it keeps every rank busy."""
    return max(map(len, split.parts)) <= -(-size // len(split.parts)) * 1.5


def used(splits: Mapping[int, Split]) -> set[int]:
    """Axes that some dimension is divided over."""
    return {axis for split in splits.values() for axis in split.axes}
