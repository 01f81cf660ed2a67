"""Sums, means and maxima over dimensions."""

from convoy.plans.layout import Layout
from convoy.plans.rules.rule import Placed, Situation


def rule(situation: Situation) -> Placed:
    """Sums and means over a divided dimension are partial sums; a maximum needs it whole."""
    call = situation.call
    source, output = call.attributes["input"], call.outputs[0]
    given = situation.given.get(source, Layout())
    linear = call.attributes["function"] in ("mean", "sum")
    dims = reduced_dims(call.attributes["dims"], len(situation.shape(source)))
    kept = {dim: split for dim, split in given.splits if linear or dim not in dims}
    partial = set(given.partial) if linear else set()
    asked = Layout.of(kept, partial)
    left = {}
    for dim, split in kept.items():
        if dim in dims:
            partial |= set(split.axes)
        else:
            left[dim if call.attributes["keepdim"] else dim - sum(other < dim for other in dims)] = split
    gathered = len(kept) < len(given.splits)
    note = f"{call.attributes['function']} over a divided dimension: it is whole" if gathered else ""
    return Placed({source: asked}, {output: Layout.of(left, partial)}, note)


def reduced_dims(dims: tuple[int, ...] | None, num_dims: int) -> frozenset[int]:
    """The dimensions that disappear; none named means all."""
    return frozenset(dim % num_dims for dim in dims) if dims else frozenset(range(num_dims))
