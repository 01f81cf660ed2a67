"""The best plan for one mesh and one set of sample axes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from convoy.errors import ConvoyError
from convoy.planner.search.elimination import Elimination, Table, TooWideError, restricted
from convoy.planner.search.layers import Groups, alone, in_common, tied, tied_where_wide
from convoy.planner.search.prices import Strategy
from convoy.planner.search.problem import Choice, Problem, Shared, assigned, build
from convoy.plans.mesh import Mesh
from convoy.plans.place import Batch

LIMIT = 20_000_000  # the most entries of a table: 64 MB


@dataclass(frozen=True)
class Solution:
    """A least sum and what gives it."""

    layers: dict[str, Strategy]
    seconds: float
    redistributions: int  # how often a tensor is brought from one layout to another
    bytes: float  # on rank 0; 0 where nobody asked
    problem: Problem
    elimination: Elimination
    solver: "Solver"

    @property
    def mesh(self) -> Mesh:
        return self.solver.batch.mesh


class Solver:
    """Finds the best plan on one mesh, where the samples are divided over the axes of a batch."""

    def __init__(
        self,
        shared: Shared,
        batch: Batch,
        allowed: Mapping[str, Sequence[Strategy]],
        outputs: Iterable[str],
        groups: Groups | None = None,
        with_memory: bool = False,
    ) -> None:
        self.batch, self.allowed = batch, allowed
        self._shared, self._outputs, self._with_memory = shared, list(outputs), with_memory
        graph = shared.prices.graph
        # layers that are given one strategy together
        self.groups = groups or tied_where_wide(alone(graph), graph, 3 if len(batch.mesh.sizes) < 2 else 2)
        self._problem: Problem | None = None

    def solve(self, time_price: float = 1.0, byte_price: float = 0.0) -> Solution:
        """The least sum of seconds, times a factor, and of bytes at a price in seconds each. A ConvoyError with a
        rule's sentence where there is no plan."""
        while True:
            choices = [Choice(group, in_common(group, self.allowed)) for group in self.groups]
            try:
                if self._problem is None:
                    self._problem = build(self._shared, self.batch, choices, self._outputs, self._with_memory)
                problem = self._problem
                tables = [
                    table if price == 1 else Table(table.scope, table.numbers * price)
                    for part, price in ((problem.seconds, time_price), (problem.bytes, byte_price))
                    for table in part
                    if price
                ]
                elimination = Elimination(tables, problem.sizes, LIMIT)
                break
            except TooWideError as error:
                met = [layer for v in error.scope if v < len(choices) for layer in choices[v].layers]
                self._problem, self.groups = None, tied(self.groups, met, self._shared.prices.graph)
        states = elimination.assignment()
        if not np.isfinite(elimination.least) or states is None:
            raise problem.refused or ConvoyError("no plan divides this network over these devices")
        return self._solution(problem, elimination, states)

    def _solution(self, problem: Problem, elimination: Elimination, states: Mapping[int, int]) -> Solution:
        seconds, held, count = (_at(part, states) for part in (problem.seconds, problem.bytes, problem.redistributions))
        return Solution(assigned(problem.choices, states), seconds, round(count), held, problem, elimination, self)

    def simplest(self, solution: Solution, budget: float) -> Solution | None:
        """Of the plans within a budget of seconds, the fastest of those with fewest redistributions; None where the
        tables that count them would be too large. The budget is at least the seconds of `solution`, the fastest."""
        if not solution.redistributions:
            return solution
        problem, budget = solution.problem, budget * (1 + 1e-12)
        marginals = solution.elimination.min_marginals()
        states_of = {v: np.flatnonzero(numbers <= budget).tolist() for v, numbers in marginals.items()}
        seconds, counts = (restricted(tables, states_of) for tables in (problem.seconds, problem.redistributions))
        sizes = {v: len(states) for v, states in states_of.items()}
        try:
            counting = Elimination(seconds, sizes, LIMIT, counts, solution.redistributions)
        except TooWideError:
            return None
        simple = counting.assignment(budget)
        if simple is None:
            return solution
        return self._solution(problem, solution.elimination, {v: states_of[v][state] for v, state in simple.items()})


def _at(tables: Iterable[Table], states: Mapping[int, int]) -> float:
    return float(sum(table.numbers[tuple(states[v] for v in table.scope)] for table in tables))
