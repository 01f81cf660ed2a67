"""Calls placed for every state of the variables that they depend on; calls that are alike, once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from convoy.errors import ConvoyError
from convoy.graph.graph import Call
from convoy.plans.rules import Batch
from convoy.search.elimination import Scope, TooWideError, aligned
from convoy.search.joins import codes_of
from convoy.search.prices import NOWHERE, Answer, Prices
from convoy.search.space import Strategy
from convoy.search.states import Ids, Keys, Known, narrowed, relabelled

GRID = 1_500_000
"""The most states that a call's inputs may have together."""

Narrow = tuple[tuple[int, ...], Ids, int]
"""Where a tensor lies: places of variables in a call's scope, numbers of layouts over these, and a key."""


@dataclass(frozen=True)
class Choice:
    """Layers that have one strategy together, mostly one layer.

    Attributes:
        strategies: what they may have, in the order of the variable's states.
    """

    layers: tuple[str, ...]
    strategies: tuple[Strategy, ...]


@dataclass(frozen=True)
class PlacedStates:
    """A call for every state of the variables that it depends on, which stand here by their places in its scope.

    Attributes:
        seconds: of the call; infinite where it cannot be.
        inside: bytes that it alone keeps.
        wants, gives: layouts of its inputs and outputs.
        keeps: places of the inputs, and after them the outputs, that it keeps for the backward pass.
        refused: what a rule said to some state.
    """

    seconds: NDArray[np.float64]
    inside: NDArray[np.float64]
    wants: list[Narrow]
    gives: list[Narrow]
    keeps: tuple[int, ...]
    refused: ConvoyError | None


class Shared:
    """What the problems of one mesh share: prices, and what was worked out for some states already.

    Attributes:
        tables: of what is sent, by what they depend on.
    """

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.keys = Keys()
        self.tables: dict[tuple[object, ...], tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        self._placed: dict[tuple[object, ...], PlacedStates] = {}

    def placed(
        self,
        call: Call,
        batch: Batch,
        given: Sequence[Known | None],
        own: tuple[int, Choice] | None,
        scope: Scope,
        sizes: Sequence[int],
    ) -> PlacedStates:
        """A call for all states.

        Args:
            call: the call.
            batch: how the samples are divided.
            given: where its inputs lie; None for parameters, buffers and constants.
            own: the variable of its layer's strategy, and what it may be; None for calls that follow.
            scope: all variables that it depends on.
            sizes: their numbers of states.

        Raises:
            TooWideError: there are too many states.
        """
        key = (
            self.prices.kind(call),
            tuple((known.key, *map(scope.index, known.scope)) if known else None for known in given),
            (scope.index(own[0]), own[1].strategies, batch.axes) if own is not None else None,
        )
        found = self._placed.get(key)
        if found is None:
            found = self._placed[key] = self._place(call, batch, given, own, scope, check_grid(scope, sizes))
        return found

    def _place(
        self,
        call: Call,
        batch: Batch,
        given: Sequence[Known | None],
        own: tuple[int, Choice] | None,
        scope: Scope,
        sizes: tuple[int, ...],
    ) -> PlacedStates:
        arrays = [aligned(known.ids, known.scope, scope) if known else None for known in given]
        strategies: Sequence[Strategy] = own[1].strategies if own is not None else ((),)
        states = np.arange(len(strategies))
        state = aligned(states, (own[0],), scope) if own is not None else np.zeros((), np.int64)
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
                found = self.prices.answer(call, batch, strategies[chosen], of_inputs)
                answer, refused = (None, found) if isinstance(found, ConvoyError) else (found, refused)
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
    """The shape of an array over some variables.

    Raises:
        TooWideError: it would be too large.
    """
    if prod(sizes) > GRID:
        raise TooWideError(scope)
    return tuple(sizes)


def _at(array: Ids, at: Sequence[NDArray[np.intp]]) -> list[int]:
    """Elements of an array that broadcasts, at some places."""
    if array.size == 1:
        return [int(array.flat[0])] * (len(at[0]) if at else 1)
    found: list[int] = array[tuple(i if n > 1 else 0 for i, n in zip(at, array.shape, strict=True))].tolist()
    return found
