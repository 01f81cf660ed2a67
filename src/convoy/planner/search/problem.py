"""A graph on a mesh as a sum of tables: what is to be chosen, and what each choice costs.

The variables are the strategies of the layers. Where a tensor lies is a function of them, an array of numbers of
layouts with one dimension for each variable that decides about it, so most calls add a table over a few variables and
no variable of their own. Where several tensors meet and what they depend on is not needed any more, the layout of the
result becomes a variable of its own: a residual network is then a chain of small tables. Calls that are alike are
placed once for every state of what they depend on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Value
from convoy.planner.search.elimination import Numbers, Scope, Table, TooWideError, aligned
from convoy.planner.search.prices import NOWHERE, Answer, Prices, Strategy, is_choosing
from convoy.plans.layout import WHOLE, Layout
from convoy.plans.place import Batch, own_samples

Ids = NDArray[np.int64]  # numbers of layouts, as `convoy.planner.search.prices.Prices.number` gives them


@dataclass(frozen=True)
class StateLayouts:
    """Where a tensor lies, for every state of the variables in `scope`."""

    scope: Scope
    ids: Ids  # numbers of layouts, one dimension for each variable
    key: int  # the same for equal `ids`


def relabelled(ids: Ids) -> tuple[Ids, Ids]:
    """The distinct numbers of an array, ascending, and for every element the place of its number among them."""
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


GRID = 1_500_000  # the most states that a call's inputs may have together


@dataclass(frozen=True)
class Choice:
    """Layers that have one strategy together, mostly one layer."""

    layers: tuple[str, ...]
    strategies: tuple[Strategy, ...]  # in the order of the variable's states


@dataclass(frozen=True)
class PlacedStates:
    """A call for every state of the variables that it depends on, which stand here by their places in its scope."""

    seconds: Numbers  # infinite where it cannot be
    bytes: Numbers  # that it keeps for the backward pass
    wants: list[StateLayouts]  # layouts of its inputs
    gives: list[StateLayouts]  # layouts of its outputs
    refused: ConvoyError | None  # by a rule, for some state


def _at(array: Ids, at: Sequence[NDArray[np.intp]]) -> list[int]:
    """Elements of an array that broadcasts, at some places."""
    if array.size == 1:
        return [int(array.flat[0])] * (len(at[0]) if at else 1)
    picked: list[int] = array[tuple(i if n > 1 else 0 for i, n in zip(at, array.shape, strict=True))].tolist()
    return picked


def _that_share(uses: Sequence[StateLayouts], source: StateLayouts) -> list[list[StateLayouts]]:
    """Uses that may want a value in the same layout, other than where it is, together; the same use but once."""
    groups: list[tuple[set[int], list[StateLayouts]]] = []
    alone = {int(source.ids)} if not source.scope else set()
    for use_of in {(use.scope, use.key): use for use in uses}.values():
        layouts = set(relabelled(use_of.ids)[0].tolist()) - alone - {NOWHERE}
        if not layouts:
            continue
        joined = [group for group in groups if group[0] & layouts]
        groups = [group for group in groups if not group[0] & layouts]
        members = [other for group in joined for other in group[1]] + [use_of]
        groups.append((layouts.union(*(group[0] for group in joined)), members))
    return [members for _, members in groups]


@dataclass
class Problem:
    """The sum of tables for one mesh, one set of sample axes and one list of choices."""

    choices: Sequence[Choice]
    # number of states of every variable; the first ones are the choices
    sizes: dict[int, int] = field(default_factory=dict)
    seconds: list[Table] = field(default_factory=list)
    bytes: list[Table] = field(default_factory=list)  # on rank 0
    # how often a tensor is brought from one layout to another
    redistributions: list[Table] = field(default_factory=list)
    refused: ConvoyError | None = None  # by a rule, for where no combination is left


def build(prices: Prices, batch: Batch, choices: Sequence[Choice], outputs: Iterable[str]) -> Problem:
    """The tables of a graph; a TooWideError where too much meets in one call. Every layer whose rule looks at its
    strategy is in one of the choices."""
    return _Builder(prices, batch, choices).build(list(outputs))


class _Builder:
    def __init__(self, prices: Prices, batch: Batch, choices: Sequence[Choice]) -> None:
        self.prices, self.graph = prices, prices.graph
        self.batch = batch
        self.problem = Problem(choices, {v: len(choice.strategies) for v, choice in enumerate(choices)})
        self.variable = {layer: v for v, choice in enumerate(choices) for layer in choice.layers}
        self.layouts: dict[str, StateLayouts] = {}
        self.uses: dict[str, list[StateLayouts]] = {}

    def build(self, outputs: list[str]) -> Problem:
        graph = self.graph
        samples = self.batch.split(self.batch.axes)
        of_batch = Layout.of({0: samples}) if samples else WHOLE
        for name in graph.inputs:
            shape = graph.shape(name)
            self.layouts[name] = self._constant(of_batch if shape and shape[0] == self.batch.num_samples else WHOLE)
        last = {name: place for place, call in enumerate(graph.calls) for name in call.inputs}
        last |= dict.fromkeys(outputs, len(graph.calls))
        places_of_choices = {
            self.variable[call.layer]: place for place, call in enumerate(graph.calls) if is_choosing(call)
        }
        live: dict[str, Scope] = {}
        for place, call in enumerate(graph.calls):
            self._call(call)
            for name in call.inputs:
                if last[name] == place:
                    live.pop(name, None)
            for name in call.outputs:
                still_live = {v for other, scope in live.items() if other != name for v in scope}
                still_live |= {v for output in call.outputs if output != name for v in self.layouts[output].scope}
                needed = still_live | {v for v, at in places_of_choices.items() if at > place}
                self._cut(name, needed)
                if last.get(name, -1) > place:
                    live[name] = self.layouts[name].scope
        for name in outputs:
            if name not in self.layouts:
                self.layouts[name] = self._constant(WHOLE)
            self.uses.setdefault(name, []).append(self._constant(own_samples(graph.shape(name), self.batch)))
        for name, uses in self.uses.items():
            for scope, seconds, count in self._sent(graph.values[name], self.layouts[name], uses):
                self._add(self.problem.seconds, scope, seconds)
                self._add(self.problem.redistributions, scope, count)
        return self.problem

    def _constant(self, layout: Layout) -> StateLayouts:
        ids = np.array(self.prices.number(layout))
        return StateLayouts((), ids, self.prices.key(ids))

    def _call(self, call: Call) -> None:
        """Place a call for all states of what it depends on, and note what it takes and gives."""
        inputs = [
            self.layouts[name] if self.graph.values[name].origin in ("call", "input") else None for name in call.inputs
        ]
        variable = self.variable[call.layer] if is_choosing(call) else None
        variables = {v for place in inputs if place for v in place.scope}
        scope = tuple(sorted(variables | {variable} if variable is not None else variables))
        choice = (variable, self.problem.choices[variable]) if variable is not None else None
        question = (
            tuple((place.key, *map(scope.index, place.scope)) if place else None for place in inputs),
            (scope.index(choice[0]), choice[1].strategies, self.batch.axes) if choice is not None else None,
        )
        ask = partial(self._placed, call, inputs, choice, scope)
        placed = self.prices.once("placed", self.prices.kind(call), *question, ask=ask)
        if placed.refused is not None:
            self.problem.refused = placed.refused
        self._add(self.problem.seconds, scope, placed.seconds)
        self._add(self.problem.bytes, scope, placed.bytes)
        wants, gives = (
            [replace(layouts, scope=tuple(scope[place] for place in layouts.scope)) for layouts in part]
            for part in (placed.wants, placed.gives)
        )
        for name, want in zip(call.inputs, wants, strict=True):
            if name in self.layouts:
                self.uses.setdefault(name, []).append(want)
            else:  # a parameter or buffer is kept where its first call wants it
                self.layouts[name] = want
                self._parameter(self.graph.values[name], want)
        self.layouts |= dict(zip(call.outputs, gives, strict=True))

    def _placed(
        self, call: Call, inputs: Sequence[StateLayouts | None], choice: tuple[int, Choice] | None, scope: Scope
    ) -> PlacedStates:
        """A call for all states; a TooWideError where there are too many. `inputs` says where these lie, None for
        parameters, buffers and constants; `choice` is the variable of its layer's strategy, and what it may be, None
        for calls that follow. `scope` are all variables that it depends on."""
        sizes = self._grid(scope)
        arrays = [aligned(place.ids, place.scope, scope) if place else None for place in inputs]
        strategies: Sequence[Strategy] = choice[1].strategies if choice is not None else ((),)
        states = np.arange(len(strategies))
        state = aligned(states, (choice[0],), scope) if choice is not None else np.zeros((), np.int64)
        codes = state  # equal where all is
        for ids in arrays:
            if ids is not None:
                codes = codes * (len(self.prices.layouts) + 1) + ids + 1
                codes = relabelled(codes)[1] if codes.size and codes.max() > 1 << 40 else codes
        numbers, inverse = relabelled(np.broadcast_to(codes, sizes))
        first = np.empty(len(numbers), np.int64)
        first[inverse.ravel()[::-1]] = np.arange(inverse.size)[::-1]
        at = np.unravel_index(first, sizes) if sizes else ()
        columns = [[NOWHERE] * len(first) if array is None else _at(array, at) for array in arrays]
        depends = [array is not None for array in arrays]
        answers: list[Answer | None] = []
        refused = None
        for number, *of_inputs in zip(_at(state, at), *columns, strict=True):
            answer = None
            if not any(n == NOWHERE and depending for n, depending in zip(of_inputs, depends, strict=True)):
                result = self.prices.answer(call, self.batch, strategies[number], of_inputs)
                answer, refused = (None, result) if isinstance(result, ConvoyError) else (result, refused)
            answers.append(answer)

        def spread(numbers: Iterable[float], kind: type) -> NDArray:
            return np.array(list(numbers), kind)[inverse]

        def narrow(numbers: Iterable[int]) -> StateLayouts:
            places, ids = narrowed(spread(numbers, np.int64))
            return StateLayouts(places, ids, self.prices.key(ids))

        return PlacedStates(
            spread((np.inf if a is None else a.seconds for a in answers), np.float64),
            spread((0.0 if a is None else a.bytes for a in answers), np.float64),
            [narrow(NOWHERE if a is None else a.wants[n] for a in answers) for n in range(len(call.inputs))],
            [narrow(NOWHERE if a is None else a.gives[n] for a in answers) for n in range(len(call.outputs))],
            refused,
        )

    def _grid(self, scope: Scope) -> tuple[int, ...]:
        """The shape of an array over some variables; a TooWideError where it would be too large."""
        sizes = tuple(self.problem.sizes[v] for v in scope)
        if prod(sizes) > GRID:
            raise TooWideError(scope)
        return sizes

    def _sent(
        self, value: Value, source: StateLayouts, uses: Sequence[StateLayouts]
    ) -> Iterator[tuple[Scope, Numbers, Numbers]]:
        """What it takes to bring a value to all who use it, once for those that want it in the same layout: by the
        variables that it depends on, seconds of the messages, and how often the value is redistributed."""
        for group in _that_share(uses, source):
            scope = tuple(sorted({*source.scope, *(v for use in group for v in use.scope)}))
            key = (
                (value.shape, value.dtype.itemsize, value.name in self.graph.differentiable),
                tuple((place.key, *map(scope.index, place.scope)) for place in (source, *group)),
            )
            yield scope, *self.prices.once("sent", *key, ask=partial(self._distinct, value, source, group, scope))

    def _distinct(
        self, value: Value, origin: StateLayouts, uses: Sequence[StateLayouts], scope: Scope
    ) -> tuple[Numbers, Numbers]:
        shape = self._grid(scope)
        total, count = np.zeros(shape), np.zeros(shape)
        source = aligned(origin.ids, origin.scope, scope)
        targets = [aligned(use.ids, use.scope, scope) for use in uses]
        left, left_at = relabelled(source)
        for place, target in enumerate(targets):
            once = (source != target) & (source != NOWHERE) & (target != NOWHERE)
            for other in targets[:place]:
                once = once & (other != target)
            if once.any():
                right, right_at = relabelled(target)
                present = np.zeros((len(left), len(right)), bool)
                present[left_at, right_at] = True
                seconds = np.zeros(present.shape)
                for a, b in np.argwhere(present).tolist():
                    seconds[a, b] = self.prices.transfer(int(left[a]), int(right[b]), value)
                total += np.where(once, seconds[left_at, right_at], 0.0)
                count += once
        return total, count

    def _add(self, tables: list[Table], scope: Scope, numbers: Numbers) -> None:
        if numbers.any():
            tables.append(Table(scope, numbers))

    def _cut(self, name: str, needed: set[int]) -> None:
        """Make the layout of a value a variable, where it says less than the variables that decide about it and
        nobody else asks for one of these."""
        place = self.layouts[name]
        if not place.scope or needed.issuperset(place.scope):
            return
        distinct, _ = relabelled(place.ids)
        distinct = distinct[distinct != NOWHERE]
        if len(distinct) >= place.ids.size or (len(place.scope) == 1 and len(distinct) > 0.9 * place.ids.size):
            return
        if place.ids.size * len(distinct) > 10 * GRID:
            raise TooWideError(place.scope)
        variable = len(self.problem.sizes)
        self.problem.sizes[variable] = len(distinct)
        agrees = np.where(place.ids[..., None] == distinct, 0.0, np.inf)
        self.problem.seconds.append(Table((*place.scope, variable), agrees))
        self.layouts[name] = StateLayouts((variable,), distinct, self.prices.key(distinct))

    def _parameter(self, value: Value, home: StateLayouts) -> None:
        if value.origin != "parameter":
            return
        numbers, at = relabelled(home.ids)
        costs = [self.prices.parameter(value, int(n)) if n != NOWHERE else None for n in numbers]
        pairs = [(0.0, 0.0) if cost is None else (cost.seconds, cost.held) for cost in costs]
        seconds, held = np.array(pairs).T[:, at]
        self._add(self.problem.seconds, home.scope, seconds)
        self._add(self.problem.bytes, home.scope, held)


def assigned(choices: Sequence[Choice], states: Mapping[int, int]) -> dict[str, Strategy]:
    """The strategy of every layer."""
    return {layer: choice.strategies[states[v]] for v, choice in enumerate(choices) for layer in choice.layers}
