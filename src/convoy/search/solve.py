"""The best plan for one mesh and one set of sample axes."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from convoy.errors import ConvoyError
from convoy.plans.mesh import Axes
from convoy.plans.place import COMPUTE
from convoy.plans.rules import Batch
from convoy.search.bounds import kept, least_of_layers, possible, relaxed
from convoy.search.elimination import Elimination, Numbers, Table, TooWideError
from convoy.search.fewest import fewest, restricted
from convoy.search.floor import Floor
from convoy.search.placing import Choice, Shared
from convoy.search.problem import Problem, Sent, assigned, build
from convoy.search.space import Strategy
from convoy.search.ties import Groups, alone, tied, tied_where_wide

LIMIT = 20_000_000
"""The most entries of a table: 64 MB."""

INTERESTING = 1.1
"""Where a mesh is too wide to be searched in full, plans are left out that take this much longer than one known."""

_RELAXED = 50_000
_BRANCHES = 400


class UninterestingError(Exception):
    """No plan takes as little as `enough` seconds."""


@dataclass(frozen=True)
class Solution:
    """A least sum and what gives it.

    Attributes:
        layers: the strategy of every layer.
        seconds: their sum.
        redistributions: how often a tensor is brought from one layout to another.
        bytes: the sum of bytes on rank 0, 0 where nobody asked.
        groups: layers that were given one strategy together.
    """

    layers: dict[str, Strategy]
    seconds: float
    redistributions: int
    bytes: float
    groups: Groups
    problem: Problem
    elimination: Elimination


class Solver:
    """Finds the best plan on one mesh, where the samples are divided over the axes of a batch.

    Args:
        shared: what is known of the graph on the mesh.
        batch: how the samples are divided.
        allowed: for every layer its strategies.
        outputs: names of the values that the network returns.
        groups: layers to be given one strategy together.
        with_memory: whether bytes are counted too.
        enough: seconds beyond which a plan is of no interest.
        tolerance: by this share plans may take longer than the fastest and are to be found all the same.

    Attributes:
        gave_up: whether `using_all_axes` stopped before it knew.
    """

    def __init__(
        self,
        shared: Shared,
        batch: Batch,
        allowed: Mapping[str, Sequence[Strategy]],
        outputs: Iterable[str],
        groups: Groups | None = None,
        with_memory: bool = False,
        enough: float = float("inf"),
        tolerance: float = 0.0,
    ) -> None:
        self.shared = shared
        self.batch = batch
        self.allowed = allowed
        self.outputs = list(outputs)
        graph = shared.prices.graph
        most = 9 if len(batch.mesh.sizes) < 2 else 3 if with_memory else 4
        self.groups = groups or tied_where_wide(alone(graph), graph, most)
        self.with_memory = with_memory
        self.enough = enough
        self.tolerance = tolerance
        self.gave_up = False
        self._problem: Problem | None = None
        joins = any(call.op == "cat" and len(call.inputs) > 2 for call in graph.calls)
        self._is_wide = any(len(group) > 1 for group in self.groups) or (joins and len(batch.mesh.sizes) > 1)
        self._kept: dict[Groups, Mapping[str, Sequence[Strategy]]] = {}
        self._floor: Floor | None = None

    def problem(self, only: Mapping[str, Sequence[Strategy]] | None = None) -> Problem:
        """The tables, of as few groups as must be tied.

        Args:
            only: what some layers may have at most.
        """
        while True:
            choices = [Choice(group, _common(group, {**self._possible(), **(only or {})})) for group in self.groups]
            try:
                return build(self.shared, self.batch, choices, self.outputs, self.with_memory)
            except TooWideError as error:
                self._narrow(choices, error)

    def solve(
        self, byte_price: float = 0.0, only: Mapping[str, Sequence[Strategy]] | None = None, time_price: float = 1.0
    ) -> Solution:
        """The least sum of seconds, and of bytes at a price in seconds each.

        Args:
            byte_price: seconds that a byte counts.
            only: what some layers may have at most.
            time_price: what a second counts.

        Raises:
            ConvoyError: there is no plan; the sentence is that of a rule.
            UninterestingError: there is none that takes as little as `enough` seconds.
        """
        while True:
            problem = self._problem if only is None and self._problem is not None else self.problem(only)
            tables = [*problem.seconds, *problem.ends]
            if time_price != 1:
                tables = [Table(table.scope, table.numbers * time_price) for table in tables]
            tables += [Table(table.scope, table.numbers * byte_price) for table in problem.bytes if byte_price]
            try:
                elimination = Elimination(tables, problem.sizes, LIMIT)
                break
            except TooWideError as error:
                self._problem = None
                self._narrow(problem.choices, error)
        if only is None:
            self._problem = problem
        if self._is_wide and elimination.least > self.enough and not self.with_memory:
            raise UninterestingError(elimination.least)
        if not np.isfinite(elimination.least):
            raise problem.refused or ConvoyError("no plan divides this network over these devices")
        return self._solution(problem, elimination, elimination.assignment())

    def _solution(self, problem: Problem, elimination: Elimination, states: Mapping[int, int]) -> Solution:
        seconds, held, count = (
            _at(each, states) for each in ((*problem.seconds, *problem.ends), problem.bytes, problem.redistributions)
        )
        layers = assigned(problem.choices, states)
        return Solution(layers, seconds, round(count), held, self.groups, problem, elimination)

    def simplest(self, solution: Solution, budget: float) -> Solution:
        """Of the plans that take at most so many seconds, the fastest of those with fewest redistributions.

        Args:
            solution: the fastest one.
            budget: seconds, at least those of the solution and at most by the solver's tolerance more.
        """
        if not solution.redistributions:
            return solution
        problem, budget = solution.problem, budget * (1 + 1e-12)
        marginals = solution.elimination.min_marginals()
        kept = {v: np.flatnonzero(numbers <= budget).tolist() for v, numbers in marginals.items()}
        seconds, counts = (
            restricted(tables, kept) for tables in ([*problem.seconds, *problem.ends], problem.redistributions)
        )
        sizes = {v: len(states) for v, states in kept.items()}
        try:
            found = fewest(seconds, counts, sizes, budget, solution.redistributions, LIMIT)
        except TooWideError:
            return solution
        if found is None:
            return solution
        return self._solution(problem, solution.elimination, {v: kept[v][state] for v, state in found.items()})

    def price(self, layers: Mapping[str, Strategy]) -> tuple[float, int]:
        """Seconds and number of redistributions of one plan; infinite seconds where it cannot be."""
        choices = [Choice((layer,), (layers[layer],)) for layer in self.allowed]
        problem = build(self.shared, self.batch, choices, self.outputs)
        found = Elimination([*problem.seconds, *problem.ends], problem.sizes, LIMIT)
        if not np.isfinite(found.least):
            return float("inf"), 0
        return found.least, round(_at(problem.redistributions, found.assignment()))

    def floor(self, batch: Batch) -> float:
        """Seconds that every plan takes at least that divides the samples over fewer axes; 0 where it is not known."""
        return self._floor.of(batch) if self._floor is not None else 0.0

    def _possible(self) -> Mapping[str, Sequence[Strategy]]:
        """What the layers may have in a best plan. All that is allowed, unless that was too much to search.

        Under a limit of memory nothing is left out: what fits may cost more than any plan that is known.
        """
        if self.with_memory or not self._is_wide:
            return self.allowed
        if self.groups not in self._kept:
            self._kept[self.groups] = self._pruned()
        return self._kept[self.groups]

    def _pruned(self) -> Mapping[str, Sequence[Strategy]]:
        """What is left after what the layers cost at least, and then whole plans at least.

        Raises:
            UninterestingError: nothing.
        """
        enough = self.enough
        if not np.isfinite(enough):
            enough, _ = self.price({layer: self._plain(given) for layer, given in self.allowed.items()})
        least = least_of_layers(self.shared.prices, self.batch, self.allowed)
        most = enough * INTERESTING
        found = possible(least, self.allowed, self.groups, most)
        choices = [Choice(group, _common(group, found)) for group in self.groups]
        # where many layers have one strategy together, the work alone says much, and asking what is sent takes long
        tied = any(len(group) > 1 for group in self.groups)
        rounds: Sequence[Sent] = (
            ("nothing",) if tied else ("nothing", "at least") if self.enough < np.inf else ("at least",)
        )
        try:
            for sent in rounds:
                problem = build(self.shared, self.batch, choices, self.outputs, sent=sent)
                inner = relaxed(problem.seconds, _RELAXED)
                elimination = Elimination([*inner, *relaxed(problem.ends, _RELAXED)], problem.sizes, LIMIT)
                if elimination.least > self.enough:
                    raise UninterestingError(elimination.least)
        except TooWideError:
            return found
        self._floor = Floor(self.shared.prices.graph, self.batch, choices, inner, problem.sizes, most)
        layers = assigned(choices, elimination.assignment())
        if self._uses_all_axes(layers):
            enough = min(enough, self.price(layers)[0])
        bounds = elimination.min_marginals()
        for v, choice in enumerate(choices):
            near = kept(choice.strategies, list(bounds[v]), enough * (1 + self.tolerance))
            found |= dict.fromkeys(choice.layers, near)
        return found

    def _uses_all_axes(self, layers: Mapping[str, Strategy]) -> bool:
        ops = {call.layer: call.op for call in self.shared.prices.graph.calls if call.op in COMPUTE}
        return used_axes({layer: s for layer, s in layers.items() if layer in ops}, ops) == self.batch.axes

    def _plain(self, given: Sequence[Strategy]) -> Strategy:
        """Samples on all axes that may divide them, filters or rows on the others, as far as a layer can."""
        axes = self.batch.axes

        def rank(strategy: Strategy) -> tuple[int, int, int]:
            others = [each for axis, each in enumerate(strategy) if axis not in axes]
            return (
                sum(strategy[axis] != "sample" for axis in axes),
                sum(each not in ("filter", "height") for each in others),
                sum(each == "height" for each in others),
            )

        return min(given, key=rank)

    def _narrow(self, choices: Sequence[Choice], error: TooWideError) -> None:
        """After a table was too large: leave out what cannot be best; if that was done already, tie layers."""
        if not self._is_wide and not self.with_memory:
            self._is_wide = True
            return
        met = [layer for v in error.scope if v < len(choices) for layer in choices[v].layers]
        self.groups = tied(self.groups, met, self.shared.prices.graph)


def _common(group: Sequence[str], allowed: Mapping[str, Sequence[Strategy]]) -> tuple[Strategy, ...]:
    """What all layers of a group may have."""
    first, *others = (allowed[layer] for layer in group)
    found = tuple(strategy for strategy in first if all(strategy in other for other in others))
    if not found:
        raise ConvoyError(f"layers {', '.join(group[:3])} … would be given one strategy, but have none in common")
    return found


def _at(tables: Iterable[Table], states: Mapping[int, int]) -> float:
    return float(sum(table.numbers[tuple(states[v] for v in table.scope)] for table in tables))


def next_best(solution: Solution) -> dict[int, Numbers]:
    """For every choice the least sums by strategy, all else as good as can be."""
    marginals = solution.elimination.min_marginals()
    return {v: marginals[v] for v in range(len(solution.problem.choices))}


def used_axes(layers: Mapping[str, Strategy], ops: Mapping[str, str]) -> Axes:
    """The axes on which some layer with weights is divided by samples."""
    given = [strategy for layer, strategy in layers.items() if ops[layer] != "random"]
    return tuple(axis for axis in range(len(given[0]) if given else 0) if any(s[axis] == "sample" for s in given))


def using_all_axes(solver: Solver, solution: Solution, ops: Mapping[str, str], enough: float) -> Solution | None:
    """The best plan in which each of the solver's sample axes divides the samples of some layer.

    The solver's costs hold only for such plans: others are plans of fewer sample axes. Branch and bound over which
    layer uses an axis that the best plan does not use.

    Args:
        solver: of these sample axes.
        solution: the best plan, of all.
        ops: kind of work of every layer.
        enough: seconds that another plan is known to take; None is returned where no plan here takes less.
    """
    axes = solver.batch.axes
    heap: list[tuple[float, int, Solution, dict[str, Sequence[Strategy]]]] = [(solution.seconds, 0, solution, {})]
    count = 0
    while heap and count < _BRANCHES:
        seconds, _, found, only = heapq.heappop(heap)
        if seconds >= enough:
            return None
        missing = sorted(set(axes) - set(used_axes(found.layers, ops)))
        if not missing:
            return found
        for group in solver.groups:
            having = [s for s in only.get(group[0], solver.allowed[group[0]]) if s[missing[0]] == "sample"]
            if not having or ops[group[0]] == "random":
                continue
            count += 1
            narrower = {**only, **dict.fromkeys(group, having)}
            try:
                other = solver.solve(only=narrower)
            except ConvoyError:
                continue
            heapq.heappush(heap, (other.seconds, count, other, narrower))
    solver.gave_up = bool(heap) and heap[0][0] < enough
    return None
