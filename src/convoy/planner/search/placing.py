"""Calls placed for every state of the variables that they depend on; calls that are alike, once.

Where a tensor lies is an array of numbers of layouts, one dimension for each variable that decides about it. A
concatenation of four branches meets 17⁴ combinations of layouts on a mesh of two axes, but what it does depends on much
less: the result's splits, which are agreed on operand after operand, and the parts of operands that are divided along
the joined dimension in another way than evenly. `tests/planner/search/test_joins.py` holds this against the rule.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from convoy.errors import ConvoyError
from convoy.graph.graph import Call
from convoy.ops.layouts import even
from convoy.planner.search.elimination import Scope, TooWideError, aligned
from convoy.planner.search.prices import NOWHERE, Answer, Prices, Strategy
from convoy.plans.layout import Split
from convoy.plans.mesh import Axes
from convoy.plans.place import Batch

Ids = NDArray[np.int64]  # numbers of layouts, as `convoy.planner.search.prices.Prices.number` gives them

_LARGE = 50_000


@dataclass(frozen=True)
class Known:
    """Where a tensor lies, for every state of the variables in `scope`."""

    scope: Scope
    ids: Ids  # numbers of layouts, one dimension for each variable
    key: int  # the same for equal `ids`


class Keys:
    """Numbers for arrays, so that what was worked out for one serves all that are equal."""

    def __init__(self) -> None:
        self._large = 0
        self._known: dict[tuple[tuple[int, ...], bytes], int] = {}

    def of(self, ids: Ids) -> int:
        """The same number for equal arrays; large ones are taken to be all different."""
        if ids.size > _LARGE:
            self._large += 1
            return -self._large
        return self._known.setdefault((ids.shape, ids.tobytes()), len(self._known))


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


def narrowed(ids: Ids) -> tuple[tuple[int, ...], Ids]:
    """An array without the dimensions along which it does not change, and the places of those that are left."""
    places = list(range(ids.ndim))
    for axis in reversed(range(ids.ndim)):
        first = ids.take([0], axis=axis)
        if ids.shape[axis] == 1 or (ids == first).all():
            ids = first.squeeze(axis)
            places.pop(axis)
    return tuple(places), ids.copy(order="C")


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
    """For every state of the inputs a number; states of one number are placed alike. `given` has for every input the
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


GRID = 1_500_000  # the most states that a call's inputs may have together

# Where a tensor lies: places of variables in a call's scope, numbers of layouts over these, and a key
Narrow = tuple[tuple[int, ...], Ids, int]


@dataclass(frozen=True)
class Choice:
    """Layers that have one strategy together, mostly one layer."""

    layers: tuple[str, ...]
    strategies: tuple[Strategy, ...]  # in the order of the variable's states


@dataclass(frozen=True)
class PlacedStates:
    """A call for every state of the variables that it depends on, which stand here by their places in its scope."""

    seconds: NDArray[np.float64]  # infinite where it cannot be
    inside: NDArray[np.float64]  # bytes that it alone keeps
    wants: list[Narrow]  # layouts of its inputs
    gives: list[Narrow]  # layouts of its outputs
    keeps: tuple[int, ...]  # places of the inputs, then the outputs, that it keeps for the backward pass
    refused: ConvoyError | None  # by a rule, for some state


class Shared:
    """What the problems of one mesh share: prices, and what was worked out for some states already."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.keys = Keys()
        # seconds and counts of redistributions, by what they depend on
        self.tables: dict[tuple[object, ...], tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        self._placed: dict[tuple[object, ...], PlacedStates] = {}

    def placed(
        self,
        call: Call,
        batch: Batch,
        inputs: Sequence[Known | None],
        choice: tuple[int, Choice] | None,
        scope: Scope,
        sizes: Sequence[int],
    ) -> PlacedStates:
        """A call for all states; a TooWideError where there are too many. `given` says where its inputs lie, None for
        parameters, buffers and constants; `own` is the variable of its layer's strategy, and what it may be, None for
        calls that follow. `scope` are all variables that it depends on."""
        key = (
            self.prices.kind(call),
            tuple((place.key, *map(scope.index, place.scope)) if place else None for place in inputs),
            (scope.index(choice[0]), choice[1].strategies, batch.axes) if choice is not None else None,
        )
        states = self._placed.get(key)
        if states is None:
            states = self._placed[key] = self._place(call, batch, inputs, choice, scope, check_grid(scope, sizes))
        return states

    def _place(
        self,
        call: Call,
        batch: Batch,
        inputs: Sequence[Known | None],
        choice: tuple[int, Choice] | None,
        scope: Scope,
        sizes: tuple[int, ...],
    ) -> PlacedStates:
        arrays = [aligned(place.ids, place.scope, scope) if place else None for place in inputs]
        strategies: Sequence[Strategy] = choice[1].strategies if choice is not None else ((),)
        states = np.arange(len(strategies))
        state = aligned(states, (choice[0],), scope) if choice is not None else np.zeros((), np.int64)
        codes = codes_of(call, self.prices, arrays) * len(strategies) + state
        numbers, inverse = relabelled(np.broadcast_to(codes, sizes))
        first = np.empty(len(numbers), np.int64)
        first[inverse.ravel()[::-1]] = np.arange(inverse.size)[::-1]
        at = np.unravel_index(first, sizes) if sizes else ()
        columns = [[NOWHERE] * len(first) if array is None else _at(array, at) for array in arrays]
        depends = [array is not None for array in arrays]
        answers: list[Answer | None] = []
        refused = None
        for chosen, *of_inputs in zip(_at(state, at), *columns, strict=True):
            answer = None
            if not any(n == NOWHERE and depending for n, depending in zip(of_inputs, depends, strict=True)):
                result = self.prices.answer(call, batch, strategies[chosen], of_inputs)
                answer, refused = (None, result) if isinstance(result, ConvoyError) else (result, refused)
            answers.append(answer)

        def spread(numbers: Iterable[float], kind: type) -> NDArray:
            return np.array(list(numbers), kind)[inverse]

        def narrow(numbers: Iterable[int]) -> Narrow:
            places, ids = narrowed(spread(numbers, np.int64))
            return places, ids, self.keys.of(ids)

        return PlacedStates(
            spread((np.inf if a is None else a.seconds for a in answers), np.float64),
            spread((0.0 if a is None else a.inside for a in answers), np.float64),
            [narrow(NOWHERE if a is None else a.wants[n] for a in answers) for n in range(len(call.inputs))],
            [narrow(NOWHERE if a is None else a.gives[n] for a in answers) for n in range(len(call.outputs))],
            next((a.keeps for a in answers if a is not None), ()),
            refused,
        )


def check_grid(scope: Scope, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of an array over some variables; a TooWideError where it would be too large."""
    if prod(sizes) > GRID:
        raise TooWideError(scope)
    return tuple(sizes)


def _at(array: Ids, at: Sequence[NDArray[np.intp]]) -> list[int]:
    """Elements of an array that broadcasts, at some places."""
    if array.size == 1:
        return [int(array.flat[0])] * (len(at[0]) if at else 1)
    picked: list[int] = array[tuple(i if n > 1 else 0 for i, n in zip(at, array.shape, strict=True))].tolist()
    return picked
