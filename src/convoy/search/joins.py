"""Which combinations of layouts a join cannot tell apart, so that its rule is asked once for each kind.

A concatenation of four branches meets 17⁴ combinations of layouts on a mesh of two axes. What it does depends on much
less: the result's splits, which are agreed on operand after operand, and the parts of operands that are divided
along the joined dimension in another way than evenly. `tests/search/test_joins.py` holds this against the rule.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from convoy.graph.graph import Call
from convoy.plans.layout import Split
from convoy.plans.mesh import Axes
from convoy.plans.rules.layouts import even
from convoy.search.prices import NOWHERE, Prices
from convoy.search.states import Ids, relabelled

Target = tuple[tuple[int, Split], ...]
Thing = TypeVar("Thing")
_MANY = 64  # more than there are sets of axes


def combined(codes: Ids, more: Ids, size: int) -> Ids:
    """One code for two, as small as can be."""
    product: Ids = codes * size + more
    if product.size and int(product.max()) > 1 << 40:
        return np.unique(product, return_inverse=True)[1].reshape(product.shape)
    return product


def codes_of(call: Call, prices: Prices, given: Sequence[Ids | None]) -> Ids:
    """For every state of the inputs a number; states of one number are placed alike.

    Args:
        call: the call.
        prices: of its graph and mesh.
        given: for every input the numbers of its layouts, all of one shape; None for parameters and the like.
    """
    if call.op == "cat" and len(call.inputs) > 2:
        return _joined(call, prices, given)
    codes: Ids | None = None
    for ids in given:
        if ids is not None:
            codes = ids + 1 if codes is None else combined(codes, ids + 1, len(prices.layouts) + 1)
    return codes if codes is not None else np.zeros((), np.int64)


def _joined(call: Call, prices: Prices, given: Sequence[Ids | None]) -> Ids:
    graph, mesh = prices.graph, prices.mesh
    dim = call.attributes["dim"] % len(graph.shape(call.outputs[0]))
    first: dict[object, tuple[str, Ids]] = {}
    for name, ids in zip(call.inputs, given, strict=True):
        if ids is not None:  # an operand that lies as an earlier one of its size has nothing to add
            first.setdefault((graph.shape(name)[dim], ids.shape, ids.tobytes()), (name, ids))
    known = list(first.values())
    targets: list[Target] = [()]
    numbers: dict[Target, int] = {(): 0}
    at: Ids = np.zeros((), np.int64)
    for _, ids in known:  # all operands have as many elements once they are as long as the result: in order
        at = _table(at, ids, lambda a, i: _number(_agreed(targets[a], prices, i, dim), targets, numbers))
    ways: list[Axes] = [()]
    way_numbers: dict[Axes, int] = {(): 0}
    way: Ids = np.zeros_like(at)
    for _, ids in sorted(known, key=lambda item: -graph.shape(item[0])[dim]):

        def along(code: int, i: int) -> int:
            target, found = divmod(code, _MANY)
            if found:
                return found
            split = prices.layouts[i].split(dim) if i != NOWHERE else None
            used = {axis for _, other in targets[target] for axis in other.axes}
            axes = split.axes if split is not None and not set(split.axes) & used else ()
            return _number(axes, ways, way_numbers)

        way = _table(at * _MANY + way, ids, along)
    codes = at * len(ways) + way
    for name, ids in known:
        evens = {axes: even(mesh, axes, graph.shape(name)[dim]) for axes in ways if axes}
        unusual: dict[Split, int] = {}

        def odd(a: int, i: int, evens: dict[Axes, Split] = evens, unusual: dict[Split, int] = unusual) -> int:
            split = prices.layouts[i].split(dim) if i != NOWHERE else None
            if split is None or split.axes != ways[a] or split == evens[split.axes]:
                return 0
            return unusual.setdefault(split, len(unusual) + 1)

        found = _table(way, ids, odd)
        if unusual:
            codes = combined(codes, found, len(unusual) + 1)
    nowhere = np.zeros(codes.shape, bool)
    for _, ids in known:
        nowhere = nowhere | (ids == NOWHERE)
    return np.where(nowhere, -1, codes)


def _agreed(target: Target, prices: Prices, number: int, dim: int) -> Target:
    """What the result's splits are once another operand has had its say, as `elementwise.agreed` has it."""
    if number == NOWHERE:
        return target
    splits = dict(target)
    taken = {axis for split in splits.values() for axis in split.axes}
    for other, split in prices.layouts[number].splits:
        if other not in splits and not set(split.axes) & taken and other != dim:
            splits[other] = split
            taken |= set(split.axes)
    return tuple(sorted(splits.items(), key=lambda item: item[0]))


def _table(first: Ids, second: Ids, function: Callable[[int, int], int]) -> Ids:
    """A function of two numbers for whole arrays, called once for each pair."""
    left, left_at = relabelled(first)
    right, right_at = relabelled(second)
    found = np.array([[function(a, b) for b in right.tolist()] for a in left.tolist()], np.int64)
    return found[left_at, right_at]


def _number(thing: Thing, things: list[Thing], numbers: dict[Thing, int]) -> int:
    """The number of a thing in a list, to which it is added where it is new."""
    if thing not in numbers:
        numbers[thing] = len(things)
        things.append(thing)
    return numbers[thing]
