"""A graph on a mesh as a sum of tables: what is to be chosen, and what each choice costs.

The variables are the strategies of the layers. Where a tensor lies is a function of them, so most calls add a table
over a few variables and no variable of their own. Where several tensors meet and what they depend on is not needed
any more, the layout of the result becomes a variable of its own: a residual network is then a chain of small tables.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Value
from convoy.plans.layout import WHOLE, Layout
from convoy.plans.place import own_samples
from convoy.plans.rules import Batch
from convoy.search.elimination import Scope, Table, TooWideError, aligned
from convoy.search.joins import Ids, codes_of, relabelled
from convoy.search.prices import NOWHERE, Answer, Prices, is_choosing
from convoy.search.space import Strategy

Sent = Literal["exactly", "at least", "nothing"]

GRID = 1_500_000
"""The most states that a call's inputs may have together."""

_LARGE = 50_000


@dataclass(frozen=True)
class Known:
    """Where a tensor lies, for every state of the variables in `scope`.

    Attributes:
        ids: numbers of layouts, one dimension for each variable.
        key: the same for equal `ids`.
    """

    scope: Scope
    ids: Ids
    key: int


@dataclass(frozen=True)
class Choice:
    """Layers that have one strategy together, mostly one layer.

    Attributes:
        strategies: what they may have, in the order of the variable's states.
    """

    layers: tuple[str, ...]
    strategies: tuple[Strategy, ...]


@dataclass
class _Placed:
    """A call for every state of the variables that it depends on, which stand here by their places in its scope."""

    seconds: NDArray[np.float64]
    inside: NDArray[np.float64]
    wants: list[tuple[tuple[int, ...], Ids, int]]
    gives: list[tuple[tuple[int, ...], Ids, int]]
    keeps: tuple[int, ...]
    refused: ConvoyError | None


@dataclass
class Problem:
    """The sum of tables for one mesh, one set of sample axes and one list of choices.

    Attributes:
        sizes: number of states of every variable; the first ones are the choices.
        seconds: tables of seconds.
        bytes: tables of bytes on rank 0; empty where nobody asked for them.
        refused: what a rule said to some combination, for where none is left.
    """

    choices: Sequence[Choice]
    sizes: dict[int, int] = field(default_factory=dict)
    seconds: list[Table] = field(default_factory=list)
    bytes: list[Table] = field(default_factory=list)
    refused: ConvoyError | None = None


class Shared:
    """What the problems of one mesh share: calls that were placed for some states already."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.placed: dict[tuple[object, ...], _Placed] = {}
        self.tables: dict[tuple[object, ...], NDArray[np.float64]] = {}
        self._large = 0
        self._arrays: dict[tuple[tuple[int, ...], bytes], int] = {}

    def key(self, ids: Ids) -> int:
        """The same number for equal arrays; large ones are taken to be all different."""
        if ids.size > _LARGE:
            self._large += 1
            return -self._large
        return self._arrays.setdefault((ids.shape, ids.tobytes()), len(self._arrays))


def build(
    shared: Shared,
    batch: Batch,
    choices: Sequence[Choice],
    outputs: Iterable[str],
    with_memory: bool = False,
    sent: Sent = "exactly",
) -> Problem:
    """The tables of a graph.

    Args:
        shared: of the graph and mesh.
        batch: how the samples are divided.
        choices: the layers and what they may have; every layer whose rule looks at its strategy is in one of them.
        outputs: names of the values that the network returns.
        with_memory: whether memory counts.
        sent: how what is sent between calls is counted. `at least`: a call that may share what it wants with others
            counts its part of it. Unless it is `exactly`, the least sum is a lower bound.

    Raises:
        TooWideError: too much meets in one call.
    """
    return _Builder(shared, batch, choices, with_memory, sent).build(list(outputs))


class _Builder:
    def __init__(self, shared: Shared, batch: Batch, choices: Sequence[Choice], with_memory: bool, sent: Sent) -> None:
        self.shared = shared
        self.prices = shared.prices
        self.graph = shared.prices.graph
        self.batch = batch
        self.with_memory = with_memory
        self.sent = sent
        self.problem = Problem(choices, {v: len(choice.strategies) for v, choice in enumerate(choices)})
        self.variable = {layer: v for v, choice in enumerate(choices) for layer in choice.layers}
        self.known: dict[str, Known] = {}
        self.uses: dict[str, list[Known]] = {}
        self.keeps: dict[str, list[Known]] = {}

    def build(self, outputs: list[str]) -> Problem:
        graph = self.graph
        samples = self.batch.split(self.batch.axes)
        of_batch = Layout.of({0: samples}) if samples else WHOLE
        for name in graph.inputs:
            shape = graph.shape(name)
            self.known[name] = self._constant(of_batch if shape and shape[0] == self.batch.num_samples else WHOLE)
        last = {name: place for place, call in enumerate(graph.calls) for name in call.inputs}
        last |= dict.fromkeys(outputs, len(graph.calls))
        chosen = {self.variable[call.layer]: place for place, call in enumerate(graph.calls) if is_choosing(call)}
        live: dict[str, Scope] = {}
        for place, call in enumerate(graph.calls):
            self._call(call)
            for name in call.inputs:
                if last[name] == place:
                    live.pop(name, None)
            for name in call.outputs:
                others = {v for other, scope in live.items() if other != name for v in scope}
                others |= {v for output in call.outputs if output != name for v in self.known[output].scope}
                needed = others | {v for v, at in chosen.items() if at > place}
                self._cut(name, needed)
                if last.get(name, -1) > place:
                    live[name] = self.known[name].scope
        for name in outputs:
            if name not in self.known:
                self.known[name] = self._constant(WHOLE)
            self.uses.setdefault(name, []).append(self._constant(own_samples(graph.shape(name), self.batch)))
        for name, uses in self.uses.items() if self.sent != "nothing" else ():
            self._transfers(graph.values[name], uses)
        for name, keeps in self.keeps.items():
            self._activations(graph.values[name], keeps)
        return self.problem

    def _constant(self, layout: Layout) -> Known:
        ids = np.array(self.prices.number(layout))
        return Known((), ids, self.shared.key(ids))

    def _grid(self, scope: Scope) -> tuple[int, ...]:
        sizes = tuple(self.problem.sizes[v] for v in scope)
        if prod(sizes) > GRID:
            raise TooWideError(scope)
        return sizes

    def _call(self, call: Call) -> None:
        """Place a call for all states of what it depends on, and note what it takes and gives."""
        given = [
            self.known[name] if self.graph.values[name].origin in ("call", "input") else None for name in call.inputs
        ]
        own = self.variable[call.layer] if is_choosing(call) else None
        scope = tuple(
            sorted({v for known in given if known for v in known.scope} | ({own} if own is not None else set()))
        )
        placed = self._placed(call, given, own, scope)
        if placed.refused is not None:
            self.problem.refused = placed.refused
        self._add(self.problem.seconds, scope, placed.seconds)
        self._add(self.problem.bytes, scope, placed.inside)
        wants = [self._in_scope(scope, want) for want in placed.wants]
        gives = [self._in_scope(scope, give) for give in placed.gives]
        for name, want in zip(call.inputs, wants, strict=True):
            if name in self.known:
                self.uses.setdefault(name, []).append(want)
            else:  # a parameter or buffer is kept where its first call wants it
                self.known[name] = want
                self._parameter(self.graph.values[name], want)
        self.known |= dict(zip(call.outputs, gives, strict=True))
        tensors = [*zip(call.inputs, wants, strict=True), *zip(call.outputs, gives, strict=True)]
        for place in placed.keeps if self.with_memory else ():
            self.keeps.setdefault(tensors[place][0], []).append(tensors[place][1])

    @staticmethod
    def _in_scope(scope: Scope, found: tuple[tuple[int, ...], Ids, int]) -> Known:
        places, ids, key = found
        return Known(tuple(scope[place] for place in places), ids, key)

    def _placed(self, call: Call, given: Sequence[Known | None], own: int | None, scope: Scope) -> _Placed:
        strategies = self.problem.choices[own].strategies if own is not None else ()
        key = (
            self.prices.kind(call),
            tuple((known.key, *map(scope.index, known.scope)) if known else None for known in given),
            scope.index(own) if own is not None else None,
            strategies,
            self.batch.axes if own is not None else None,
        )
        found = self.shared.placed.get(key)
        if found is None:
            found = self.shared.placed[key] = self._place(call, given, own, scope)
        return found

    def _place(self, call: Call, given: Sequence[Known | None], own: int | None, scope: Scope) -> _Placed:
        sizes = self._grid(scope)
        arrays = [aligned(known.ids, known.scope, scope) if known else None for known in given]
        strategies: Sequence[Strategy] = self.problem.choices[own].strategies if own is not None else ((),)
        states = np.arange(len(strategies))
        state = aligned(states, (own,), scope) if own is not None else np.zeros((), np.int64)
        codes = codes_of(call, self.prices, arrays) * len(strategies) + state
        codes = np.broadcast_to(codes, sizes)
        numbers, inverse = relabelled(codes)
        first = np.empty(len(numbers), np.int64)
        first[inverse.ravel()[::-1]] = np.arange(codes.size)[::-1]
        flat = [None if array is None else np.broadcast_to(array, sizes).ravel()[first] for array in arrays]
        chosen = np.broadcast_to(state, sizes).ravel()[first]
        answers: list[Answer | None] = []
        refused = None
        for place in range(len(first)):
            of_inputs = [NOWHERE if column is None else int(column[place]) for column in flat]
            impossible = any(n == NOWHERE and column is not None for n, column in zip(of_inputs, flat, strict=True))
            answer = None
            if not impossible:
                found = self.prices.answer(call, self.batch, strategies[int(chosen[place])], of_inputs)
                answer, refused = (None, found) if isinstance(found, ConvoyError) else (found, refused)
            answers.append(answer)

        def spread(numbers: Iterable[float], kind: type) -> NDArray:
            return np.array(list(numbers), kind)[inverse]

        def narrow(numbers: Iterable[int]) -> tuple[tuple[int, ...], Ids, int]:
            places, ids = _narrowed(spread(numbers, np.int64))
            return places, ids, self.shared.key(ids)

        return _Placed(
            spread((np.inf if a is None else a.seconds for a in answers), np.float64),
            spread((0.0 if a is None else a.inside for a in answers), np.float64),
            [narrow(NOWHERE if a is None else a.wants[at] for a in answers) for at in range(len(call.inputs))],
            [narrow(NOWHERE if a is None else a.gives[at] for a in answers) for at in range(len(call.outputs))],
            next((a.keeps for a in answers if a is not None), ()),
            refused,
        )

    def _add(self, tables: list[Table], scope: Scope, numbers: NDArray[np.float64]) -> None:
        if tables is self.problem.bytes and not self.with_memory:
            return
        if numbers.any():
            tables.append(Table(scope, numbers))

    def _cut(self, name: str, needed: set[int]) -> None:
        """Make the layout of a value a variable, where it says less than the variables that decide about it and
        nobody else asks for one of these."""
        known = self.known[name]
        if not known.scope or needed.issuperset(known.scope):
            return
        distinct, _ = relabelled(known.ids)
        distinct = distinct[distinct != NOWHERE]
        if len(distinct) >= known.ids.size or (len(known.scope) == 1 and len(distinct) > 0.9 * known.ids.size):
            return
        if known.ids.size * len(distinct) > 10 * GRID:
            raise TooWideError(known.scope)
        variable = len(self.problem.sizes)
        self.problem.sizes[variable] = len(distinct)
        if self.sent == "exactly" or known.ids.size < _LARGE:
            agrees = np.where(known.ids[..., None] == distinct, 0.0, np.inf)
            self.problem.seconds.append(Table((*known.scope, variable), agrees))
        else:
            self._agree_in_pairs(known, distinct, variable)
        self.known[name] = Known((variable,), distinct, self.shared.key(distinct))

    def _agree_in_pairs(self, known: Known, distinct: Ids, variable: int) -> None:
        """A lower bound for a large table: which states of each variable go with a layout at all."""
        valid = known.ids != NOWHERE
        at = np.searchsorted(distinct, known.ids)[valid]
        for v in known.scope:
            numbers = np.full((self.problem.sizes[v], len(distinct)), np.inf)
            states = aligned(np.arange(self.problem.sizes[v]), (v,), known.scope)
            numbers[np.broadcast_to(states, known.ids.shape)[valid], at] = 0.0
            self.problem.seconds.append(Table((v, variable), numbers))

    def _parameter(self, value: Value, home: Known) -> None:
        if value.origin != "parameter":
            return
        numbers, at = relabelled(home.ids)
        pairs = [self.prices.parameter(value, int(n)) if n != NOWHERE else (0.0, 0.0) for n in numbers]
        seconds, held = np.array(pairs).T[:, at]
        self._add(self.problem.seconds, home.scope, seconds)
        self._add(self.problem.bytes, home.scope, held)

    def _transfers(self, value: Value, uses: Sequence[Known]) -> None:
        """What it costs to bring a value to all who use it: once for those that want it in the same layout."""
        here = self.known[value.name]
        groups = [(group, 1) for group in _that_share(uses, here)]
        if self.sent == "at least":
            groups = [([use], len(group)) for group, _ in groups for use in group]
        for group, share in groups:
            scope = tuple(sorted({*here.scope, *(v for use in group for v in use.scope)}))
            key = (
                "transfers",
                (value.shape, value.dtype.itemsize, value.name in self.prices.differentiable),
                tuple((known.key, *map(scope.index, known.scope)) for known in (here, *group)),
            )
            if key not in self.shared.tables:
                self.shared.tables[key] = self._distinct(value, here, group, scope)
            numbers = self.shared.tables[key]
            self._add(self.problem.seconds, scope, numbers / share if share > 1 else numbers)

    def _distinct(self, value: Value, here: Known, uses: Sequence[Known], scope: Scope) -> NDArray[np.float64]:
        total = np.zeros(self._grid(scope))
        source = aligned(here.ids, here.scope, scope)
        wanted = [aligned(use.ids, use.scope, scope) for use in uses]
        for place, target in enumerate(wanted):
            seconds = self._seconds(value, source, target)
            if not seconds.any():
                continue
            again = np.zeros((), bool)
            for other in wanted[:place]:
                again = again | (other == target)
            total += np.where(again, 0.0, seconds)
        return total

    def _seconds(self, value: Value, source: Ids, target: Ids) -> NDArray[np.float64]:
        """Of each pair of layouts, as arrays that broadcast."""
        (left, left_at), (right, right_at) = relabelled(source), relabelled(target)
        present = np.zeros((len(left), len(right)), bool)
        present[left_at, right_at] = True
        table = np.zeros(present.shape)
        for a, b in zip(*np.nonzero(present), strict=True):
            table[a, b] = self.prices.transfer(int(left[a]), int(right[b]), value)
        return table[left_at, right_at]

    def _activations(self, value: Value, keeps: Sequence[Known]) -> None:
        """Bytes for what several calls keep of a value: once for each layout."""
        uses = list({(use.scope, use.key): use for use in keeps}.values())
        nowhere = Known((), np.array(NOWHERE - 1), -1)
        for group in _that_share(uses, nowhere):
            scope = tuple(sorted({v for use in group for v in use.scope}))
            total = np.zeros(self._grid(scope))
            places = [aligned(self._places(value, use.ids), use.scope, scope) for use in group]
            for at, (use, place) in enumerate(zip(group, places, strict=True)):
                held = np.array(
                    [0 if n == NOWHERE else self.prices.kept(int(n), value)[1] for n in use.ids.ravel()], float
                ).reshape(use.ids.shape)
                again = np.zeros((), bool)
                for other in places[:at]:
                    again = again | (other == place)
                total += np.where(again, 0.0, aligned(held, use.scope, scope))
            self._add(self.problem.bytes, scope, total)

    def _places(self, value: Value, ids: Ids) -> Ids:
        numbers = [NOWHERE if n == NOWHERE else self.prices.kept(int(n), value)[0] for n in ids.ravel()]
        return np.array(numbers, np.int64).reshape(ids.shape)


def _narrowed(ids: Ids) -> tuple[tuple[int, ...], Ids]:
    """An array without the dimensions along which it does not change, and the places of those that are left."""
    places = list(range(ids.ndim))
    for axis in reversed(range(ids.ndim)):
        first = ids.take([0], axis=axis)
        if ids.shape[axis] == 1 or (ids == first).all():
            ids = first.squeeze(axis)
            places.pop(axis)
    return tuple(places), ids.copy(order="C")


def _that_share(uses: Sequence[Known], here: Known) -> list[list[Known]]:
    """Uses that may want a value in the same layout, other than where it is, together; the same use but once."""
    groups: list[tuple[set[int], list[Known]]] = []
    alone = {int(here.ids)} if not here.scope else set()
    for use in dict.fromkeys((use.scope, use.key) for use in uses):
        known = next(other for other in uses if (other.scope, other.key) == use)
        wanted = set(relabelled(known.ids)[0].tolist()) - alone - {NOWHERE}
        if not wanted:
            continue
        joined = [group for group in groups if group[0] & wanted]
        groups = [group for group in groups if not group[0] & wanted]
        members = [other for group in joined for other in group[1]] + [known]
        groups.append((wanted.union(*(group[0] for group in joined)), members))
    return [members for _, members in groups]


def assigned(choices: Sequence[Choice], states: Mapping[int, int]) -> dict[str, Strategy]:
    """The strategy of every layer."""
    return {layer: choice.strategies[states[v]] for v, choice in enumerate(choices) for layer in choice.layers}
