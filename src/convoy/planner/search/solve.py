"""The best plan for one mesh and one set of sample axes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from convoy.errors import ConvoyError
from convoy.planner.search.elimination import Elimination, Table, TooWideError
from convoy.planner.search.fewest import fewest, restricted
from convoy.planner.search.layers import Groups, alone, in_common, tied, tied_where_wide
from convoy.planner.search.placing import Choice, Shared
from convoy.planner.search.prices import Strategy
from convoy.planner.search.problem import Problem, assigned, build
from convoy.planner.search.pruning import Floor, UninterestingError, remaining
from convoy.plans.place import Batch

LIMIT = 20_000_000  # the most entries of a table: 64 MB


@dataclass(frozen=True)
class Solution:
    """A least sum and what gives it."""

    layers: dict[str, Strategy]
    seconds: float
    redistributions: int  # how often a tensor is brought from one layout to another
    bytes: float  # on rank 0; 0 where nobody asked
    groups: Groups  # layers that were given one strategy together
    problem: Problem
    elimination: Elimination


class Solver:
    """Finds the best plan on one mesh, where the samples are divided over the axes of a batch. Plans of more than
    `enough` seconds are of no interest; those that take longer than the fastest by the share `tolerance` are to be
    found all the same."""

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
        self.gave_up = False  # `convoy.planner.search.meshes` stopped before it knew
        self._problem: Problem | None = None
        joins = any(call.op == "cat" and len(call.inputs) > 2 for call in graph.calls)
        self._is_wide = any(len(group) > 1 for group in self.groups) or (joins and len(batch.mesh.sizes) > 1)
        self._kept: dict[Groups, Mapping[str, Sequence[Strategy]]] = {}
        self._floor: Floor | None = None

    def problem(self, only: Mapping[str, Sequence[Strategy]] | None = None) -> Problem:
        """The tables, of as few groups as must be tied; `only` is what some layers may have at most."""
        while True:
            choices = [Choice(group, in_common(group, {**self._possible(), **(only or {})})) for group in self.groups]
            try:
                return build(self.shared, self.batch, choices, self.outputs, self.with_memory)
            except TooWideError as error:
                self._narrow(choices, error)

    def solve(
        self, byte_price: float = 0.0, only: Mapping[str, Sequence[Strategy]] | None = None, time_price: float = 1.0
    ) -> Solution:
        """The least sum of seconds, and of bytes at a price in seconds each; `only` is what some layers may have at
        most. A ConvoyError with a rule's sentence where there is no plan, an UninterestingError where there is none of
        at most `enough` seconds."""
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
            _at(part, states) for part in ((*problem.seconds, *problem.ends), problem.bytes, problem.redistributions)
        )
        layers = assigned(problem.choices, states)
        return Solution(layers, seconds, round(count), held, self.groups, problem, elimination)

    def simplest(self, solution: Solution, budget: float) -> Solution | None:
        """Of the plans within a budget of seconds, the fastest of those with fewest redistributions; None where the
        tables that count them would be too large. The budget is at least the seconds of the fastest plan, `solution`,
        and at most by the solver's tolerance more."""
        if not solution.redistributions:
            return solution
        problem, budget = solution.problem, budget * (1 + 1e-12)
        marginals = solution.elimination.min_marginals()
        states_of = {v: np.flatnonzero(numbers <= budget).tolist() for v, numbers in marginals.items()}
        seconds, counts = (
            restricted(tables, states_of) for tables in ([*problem.seconds, *problem.ends], problem.redistributions)
        )
        sizes = {v: len(states) for v, states in states_of.items()}
        try:
            simple = fewest(seconds, counts, sizes, budget, solution.redistributions, LIMIT)
        except TooWideError:
            return None
        if simple is None:
            return solution
        return self._solution(problem, solution.elimination, {v: states_of[v][state] for v, state in simple.items()})

    def price(self, layers: Mapping[str, Strategy]) -> tuple[float, int]:
        """Seconds and number of redistributions of one plan; infinite seconds where it cannot be."""
        choices = [Choice((layer,), (layers[layer],)) for layer in self.allowed]
        problem = build(self.shared, self.batch, choices, self.outputs)
        elimination = Elimination([*problem.seconds, *problem.ends], problem.sizes, LIMIT)
        if not np.isfinite(elimination.least):
            return float("inf"), 0
        return elimination.least, round(_at(problem.redistributions, elimination.assignment()))

    def floor(self, batch: Batch) -> float:
        """Seconds that every plan takes at least that divides the samples over fewer axes; 0 where it is not known."""
        return self._floor.of(batch) if self._floor is not None else 0.0

    def _possible(self) -> Mapping[str, Sequence[Strategy]]:
        """The strategies that the layers may have in a best plan: all that is allowed, unless that was too much to
        search; an UninterestingError where none is left. Under a limit of memory nothing is left out: what fits may
        cost more than any plan that is known."""
        if self.with_memory or not self._is_wide:
            return self.allowed
        if self.groups not in self._kept:
            self._kept[self.groups], floor = remaining(
                self.shared,
                self.batch,
                self.allowed,
                self.outputs,
                self.groups,
                self.enough,
                self.tolerance,
                LIMIT,
                lambda layers: self.price(layers)[0],
            )
            self._floor = floor or self._floor
        return self._kept[self.groups]

    def _narrow(self, choices: Sequence[Choice], error: TooWideError) -> None:
        """After a table was too large: leave out what cannot be best; if that was done already, tie layers."""
        if not self._is_wide and not self.with_memory:
            self._is_wide = True
            return
        met = [layer for v in error.scope if v < len(choices) for layer in choices[v].layers]
        self.groups = tied(self.groups, met, self.shared.prices.graph)


def _at(tables: Iterable[Table], states: Mapping[int, int]) -> float:
    return float(sum(table.numbers[tuple(states[v] for v in table.scope)] for table in tables))
