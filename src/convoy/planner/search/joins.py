"""Which states of a call's inputs are placed alike.

A concatenation of three features meets 17³ combinations of layouts on a mesh of two axes, but what it does depends on
much less: the result's splits, which are agreed on operand after operand, and the parts of operands that are divided
along the joined dimension in another way than evenly. `tests/planner/search/test_exact.py` holds this against the rule.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from convoy.graph.graph import Call
from convoy.ops.layouts import even
from convoy.planner.search.prices import NOWHERE, Prices
from convoy.plans.layout import Split
from convoy.plans.mesh import Axes

Ids = NDArray[np.int64]  # numbers of layouts, as `convoy.planner.search.prices.Prices.number` gives them


def relabelled(ids: Ids) -> tuple[Ids, Ids]:
    """The distinct numbers of an array, ascending, and for every element the place of its number among them. As
    `numpy.unique`, without sorting where the numbers are small."""
    if ids.size == 1:
        return ids.reshape(1), np.zeros_like(ids)
    if ids.size >= 64:
        low, high = int(ids.min()), int(ids.max())
        if high - low <= 4 * ids.size:
            shifted = ids - low
            seen = np.zeros(high - low + 1, bool)
            seen[shifted] = True
            return np.flatnonzero(seen) + low, (np.cumsum(seen) - 1)[shifted]
    numbers, places = np.unique(ids, return_inverse=True)
    return numbers, places.reshape(ids.shape)


Target = tuple[tuple[int, Split], ...]
Thing = TypeVar("Thing")
_MANY = 64  # more than there are sets of axes


def combined(codes: Ids, more: Ids, size: int) -> Ids:
    """One code for two, as small as can be."""
    product: Ids = codes * size + more
    if product.size and int(product.max()) > 1 << 40:
        return np.unique(product, return_inverse=True)[1].reshape(product.shape)
    return product


def codes_of(call: Call, prices: Prices, inputs: Sequence[Ids | None]) -> Ids:
    """For every state of the inputs a number; states of one number are placed alike. `inputs` has for each of them the
    numbers of its layouts, all of one shape; None for parameters and the like."""
    if call.op == "cat" and len(call.inputs) > 2:
        return _joined(call, prices, inputs)
    codes: Ids | None = None
    for ids in inputs:
        if ids is not None:
            codes = ids + 1 if codes is None else combined(codes, ids + 1, len(prices.layouts) + 1)
    return codes if codes is not None else np.zeros((), np.int64)


def _joined(call: Call, prices: Prices, inputs: Sequence[Ids | None]) -> Ids:
    graph, mesh = prices.graph, prices.mesh
    dim = call.attributes["dim"] % len(graph.shape(call.outputs[0]))
    first: dict[object, tuple[str, Ids]] = {}
    for name, ids in zip(call.inputs, inputs, strict=True):
        if ids is not None:  # an operand that lies as an earlier one of its size has nothing to add
            first.setdefault((graph.shape(name)[dim], ids.shape, ids.tobytes()), (name, ids))
    operands = list(first.values())
    targets: list[Target] = [()]
    numbers: dict[Target, int] = {(): 0}
    at: Ids = np.zeros((), np.int64)
    for _, ids in operands:  # all operands have as many elements once they are as long as the result: in order
        at = _table(at, ids, lambda a, i: _number(_agreed(targets[a], prices, i, dim), targets, numbers))
    ways: list[Axes] = [()]
    way_numbers: dict[Axes, int] = {(): 0}
    way: Ids = np.zeros_like(at)
    for _, ids in sorted(operands, key=lambda item: -graph.shape(item[0])[dim]):

        def along(code: int, i: int) -> int:
            target, axes_number = divmod(code, _MANY)
            if axes_number:
                return axes_number
            split = prices.layouts[i].split(dim) if i != NOWHERE else None
            used = {axis for _, other in targets[target] for axis in other.axes}
            axes = split.axes if split is not None and not set(split.axes) & used else ()
            return _number(axes, ways, way_numbers)

        way = _table(at * _MANY + way, ids, along)
    codes = at * len(ways) + way
    for name, ids in operands:
        evens = {axes: even(mesh, axes, graph.shape(name)[dim]) for axes in ways if axes}
        unusual: dict[Split, int] = {}

        def odd(a: int, i: int, evens: dict[Axes, Split] = evens, unusual: dict[Split, int] = unusual) -> int:
            split = prices.layouts[i].split(dim) if i != NOWHERE else None
            if split is None or split.axes != ways[a] or split == evens[split.axes]:
                return 0
            return unusual.setdefault(split, len(unusual) + 1)

        odds = _table(way, ids, odd)
        if unusual:
            codes = combined(codes, odds, len(unusual) + 1)
    nowhere = np.zeros(codes.shape, bool)
    for _, ids in operands:
        nowhere = nowhere | (ids == NOWHERE)
    return np.where(nowhere, -1, codes)


def _agreed(target: Target, prices: Prices, number: int, dim: int) -> Target:
    """What the result's splits are once another operand has had its say, as `elementwise.agreed` has it."""
    if number == NOWHERE:
        return target
    splits = dict(target)
    used = {axis for split in splits.values() for axis in split.axes}
    for other, split in prices.layouts[number].splits:
        if other not in splits and not set(split.axes) & used and other != dim:
            splits[other] = split
            used |= set(split.axes)
    return tuple(sorted(splits.items(), key=lambda item: item[0]))


def _table(first: Ids, second: Ids, function: Callable[[int, int], int]) -> Ids:
    """A function of two numbers for whole arrays, called once for each pair."""
    left, left_at = relabelled(first)
    right, right_at = relabelled(second)
    values = np.array([[function(a, b) for b in right.tolist()] for a in left.tolist()], np.int64)
    return values[left_at, right_at]


def _number(thing: Thing, things: list[Thing], numbers: dict[Thing, int]) -> int:
    """The number of a thing in a list, to which it is added where it is new."""
    if thing not in numbers:
        numbers[thing] = len(things)
        things.append(thing)
    return numbers[thing]
