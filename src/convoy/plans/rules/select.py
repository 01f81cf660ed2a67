"""Basic indexing: a slice of a divided dimension leaves each rank with those of its indices that are in the slice."""

from convoy.plans.layout import Indices, Layout, Split, indices
from convoy.plans.rules.rule import Placed, Situation


def rule(situation: Situation) -> Placed:
    """Nothing is sent; a dimension from which one index is taken is asked for whole."""
    call = situation.call
    source, output = call.attributes["input"], call.outputs[0]
    given = situation.given.get(source, Layout())
    shape, ranges = situation.shape(source), call.attributes["ranges"]
    kept: dict[int, Split] = {}
    left: dict[int, Split] = {}
    out_dim = 0
    for dim, size in enumerate(shape):
        chosen = ranges[dim] if dim < len(ranges) else (0, size, 1)
        if isinstance(chosen, int):
            continue
        split = given.split(dim)
        if split is not None:
            kept[dim] = split
            left[out_dim] = Split(split.axes, tuple(within(part, range(*chosen)) for part in split.parts))
        out_dim += 1
    gathered = len(kept) < len(given.splits)
    note = "one index of a divided dimension: it is whole" if gathered else ""
    return Placed({source: Layout.of(kept)}, {output: Layout.of(left)}, note)


def within(part: Indices, chosen: range) -> Indices:
    """Positions in a slice of those indices of a part that are in it."""
    return indices(chosen.index(index) for index in part if index in chosen)


def places(part: Indices, chosen: range) -> Indices:
    """Positions in a part of those of its indices that are in a slice."""
    return indices(place for place, index in enumerate(part) if index in chosen)
