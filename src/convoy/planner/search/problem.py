"""A graph on a mesh as a sum of tables: what is to be chosen, and what each choice costs.

The variables are the strategies of the layers. Where a tensor lies is a function of them, so most calls add a table
over a few variables and no variable of their own. Where several tensors meet and what they depend on is not needed
any more, the layout of the result becomes a variable of its own: a residual network is then a chain of small tables.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Value
from convoy.planner.search.elimination import Scope, Table, TooWideError, aligned
from convoy.planner.search.placing import GRID, Choice, Ids, Known, Narrow, Shared, check_grid, relabelled
from convoy.planner.search.prices import NOWHERE, Strategy, is_choosing
from convoy.plans.layout import WHOLE, Layout
from convoy.plans.place import Batch, own_samples


@dataclass(frozen=True)
class Sending:
    """The cost of some uses of a value, over the variables that they depend on."""

    scope: Scope
    seconds: NDArray[np.float64]  # of the messages
    count: NDArray[np.float64]  # of redistributions: layouts, other than its own, in which the value is wanted


class Tensors:
    """The uses of tensors, as tables."""

    def __init__(self, shared: Shared, sizes: dict[int, int]) -> None:
        self._shared = shared
        self._prices = shared.prices
        self._sizes = sizes

    def sent(self, value: Value, source: Known, uses: Sequence[Known], apart: bool = False) -> list[Sending]:
        """What it takes to bring a value to all who use it: once for those that want it in the same layout. With
        `apart`, each of those that may want the same counts its part of it: a lower bound over fewer variables."""
        sendings = []
        for group in _that_share(uses, source):
            for members in [[use] for use in group] if apart else [group]:
                scope = tuple(sorted({*source.scope, *(v for use in members for v in use.scope)}))
                key = (
                    (value.shape, value.dtype.itemsize, value.name in self._prices.differentiable),
                    tuple((place.key, *map(scope.index, place.scope)) for place in (source, *members)),
                )
                if key not in self._shared.tables:
                    self._shared.tables[key] = self._distinct(value, source, members, scope)
                seconds, count = self._shared.tables[key]
                share = len(group) if apart else 1
                sendings.append(Sending(scope, seconds / share if share > 1 else seconds, count))
        return sendings

    def _distinct(
        self, value: Value, origin: Known, uses: Sequence[Known], scope: Scope
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        shape = self._grid(scope)
        total, count = np.zeros(shape), np.zeros(shape)
        source = aligned(origin.ids, origin.scope, scope)
        targets = [aligned(use.ids, use.scope, scope) for use in uses]
        for place, target in enumerate(targets):
            once = (source != target) & (source != NOWHERE) & (target != NOWHERE)
            for other in targets[:place]:
                once = once & (other != target)
            if once.any():
                total += np.where(once, self._seconds(value, source, target), 0.0)
                count += once
        return total, count

    def _seconds(self, value: Value, source: Ids, target: Ids) -> NDArray[np.float64]:
        (left, left_at), (right, right_at) = relabelled(source), relabelled(target)
        present = np.zeros((len(left), len(right)), bool)
        present[left_at, right_at] = True
        table = np.zeros(present.shape)
        sources, targets = left.tolist(), right.tolist()
        for a, b in np.argwhere(present).tolist():
            table[a, b] = self._prices.transfer(sources[a], targets[b], value)
        return table[left_at, right_at]

    def kept(self, value: Value, keeps: Sequence[Known]) -> list[tuple[Scope, NDArray[np.float64]]]:
        """Bytes for what several calls keep of a value: once for each layout."""
        uses = list({(use.scope, use.key): use for use in keeps}.values())
        nowhere = Known((), np.array(NOWHERE - 1), -1)
        tables = []
        for group in _that_share(uses, nowhere):
            scope = tuple(sorted({v for use in group for v in use.scope}))
            total = np.zeros(self._grid(scope))
            places = [aligned(self._places(value, use.ids), use.scope, scope) for use in group]
            for at, (use, place) in enumerate(zip(group, places, strict=True)):
                numbers = [0 if n == NOWHERE else self._prices.kept(int(n), value)[1] for n in use.ids.ravel()]
                held = np.array(numbers, float).reshape(use.ids.shape)
                again = np.zeros((), bool)
                for other in places[:at]:
                    again = again | (other == place)
                total += np.where(again, 0.0, aligned(held, use.scope, scope))
            tables.append((scope, total))
        return tables

    def _places(self, value: Value, ids: Ids) -> Ids:
        numbers = [NOWHERE if n == NOWHERE else self._prices.kept(int(n), value)[0] for n in ids.ravel()]
        return np.array(numbers, np.int64).reshape(ids.shape)

    def _grid(self, scope: Scope) -> tuple[int, ...]:
        return check_grid(scope, [self._sizes[v] for v in scope])


def _that_share(uses: Sequence[Known], source: Known) -> list[list[Known]]:
    """Uses that may want a value in the same layout, other than where it is, together; the same use but once."""
    groups: list[tuple[set[int], list[Known]]] = []
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


Sent = Literal["exactly", "at least", "nothing"]

_LARGE = 50_000


@dataclass
class Problem:
    """The sum of tables for one mesh, one set of sample axes and one list of choices."""

    choices: Sequence[Choice]
    # number of states of every variable; the first ones are the choices
    sizes: dict[int, int] = field(default_factory=dict)
    seconds: list[Table] = field(default_factory=list)
    ends: list[Table] = field(default_factory=list)  # of seconds for the network's inputs and outputs, beside `seconds`
    bytes: list[Table] = field(default_factory=list)  # on rank 0; empty where nobody asked for them
    # how often a tensor is brought from one layout to another
    redistributions: list[Table] = field(default_factory=list)
    refused: ConvoyError | None = None  # by a rule, for where no combination is left


def build(
    shared: Shared,
    batch: Batch,
    choices: Sequence[Choice],
    outputs: Iterable[str],
    with_memory: bool = False,
    sent: Sent = "exactly",
) -> Problem:
    """The tables of a graph; a TooWideError where too much meets in one call. Every layer whose rule looks at its
    strategy is in one of the choices. Where what is sent between calls counts `at least`, a call that may share what it
    wants with others counts its part of it. Unless it is `exactly`, the least sum is a lower bound."""
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
        self.tensors = Tensors(shared, self.problem.sizes)

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
                still_live = {v for other, scope in live.items() if other != name for v in scope}
                still_live |= {v for output in call.outputs if output != name for v in self.known[output].scope}
                needed = still_live | {v for v, at in chosen.items() if at > place}
                self._cut(name, needed)
                if last.get(name, -1) > place:
                    live[name] = self.known[name].scope
        for name in outputs:
            if name not in self.known:
                self.known[name] = self._constant(WHOLE)
            self.uses.setdefault(name, []).append(self._constant(own_samples(graph.shape(name), self.batch)))
        ends = {*graph.inputs, *outputs}
        for name, uses in self.uses.items() if self.sent != "nothing" else ():
            for sending in self.tensors.sent(graph.values[name], self.known[name], uses, apart=self.sent == "at least"):
                self._add(self.problem.ends if name in ends else self.problem.seconds, sending.scope, sending.seconds)
                self._add(self.problem.redistributions, sending.scope, sending.count)
        for name, keeps in self.keeps.items():
            for scope, held in self.tensors.kept(graph.values[name], keeps):
                self._add(self.problem.bytes, scope, held)
        return self.problem

    def _constant(self, layout: Layout) -> Known:
        ids = np.array(self.prices.number(layout))
        return Known((), ids, self.shared.keys.of(ids))

    def _call(self, call: Call) -> None:
        """Place a call for all states of what it depends on, and note what it takes and gives."""
        inputs = [
            self.known[name] if self.graph.values[name].origin in ("call", "input") else None for name in call.inputs
        ]
        variable = self.variable[call.layer] if is_choosing(call) else None
        variables = {v for place in inputs if place for v in place.scope}
        scope = tuple(sorted(variables | {variable} if variable is not None else variables))
        choice = (variable, self.problem.choices[variable]) if variable is not None else None
        sizes = [self.problem.sizes[v] for v in scope]
        placed = self.shared.placed(call, self.batch, inputs, choice, scope, sizes)
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
    def _in_scope(scope: Scope, narrow: Narrow) -> Known:
        places, ids, key = narrow
        return Known(tuple(scope[place] for place in places), ids, key)

    def _add(self, tables: list[Table], scope: Scope, numbers: NDArray[np.float64]) -> None:
        if tables is self.problem.bytes and not self.with_memory:
            return
        if numbers.any():
            tables.append(Table(scope, numbers))

    def _cut(self, name: str, needed: set[int]) -> None:
        """Make the layout of a value a variable, where it says less than the variables that decide about it and
        nobody else asks for one of these."""
        place = self.known[name]
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
        if self.sent == "exactly" or place.ids.size < _LARGE:
            agrees = np.where(place.ids[..., None] == distinct, 0.0, np.inf)
            self.problem.seconds.append(Table((*place.scope, variable), agrees))
        else:
            self._agree_in_pairs(place, distinct, variable)
        self.known[name] = Known((variable,), distinct, self.shared.keys.of(distinct))

    def _agree_in_pairs(self, place: Known, distinct: Ids, variable: int) -> None:
        """A lower bound for a large table: which states of each variable go with a layout at all."""
        valid = place.ids != NOWHERE
        at = np.searchsorted(distinct, place.ids)[valid]
        for v in place.scope:
            numbers = np.full((self.problem.sizes[v], len(distinct)), np.inf)
            states = aligned(np.arange(self.problem.sizes[v]), (v,), place.scope)
            numbers[np.broadcast_to(states, place.ids.shape)[valid], at] = 0.0
            self.problem.seconds.append(Table((v, variable), numbers))

    def _parameter(self, value: Value, home: Known) -> None:
        if value.origin != "parameter":
            return
        numbers, at = relabelled(home.ids)
        pairs = [self.prices.parameter(value, int(n)) if n != NOWHERE else (0.0, 0.0) for n in numbers]
        seconds, held = np.array(pairs).T[:, at]
        self._add(self.problem.seconds, home.scope, seconds)
        self._add(self.problem.bytes, home.scope, held)


def assigned(choices: Sequence[Choice], states: Mapping[int, int]) -> dict[str, Strategy]:
    """The strategy of every layer."""
    return {layer: choice.strategies[states[v]] for v, choice in enumerate(choices) for layer in choice.layers}
