"""The best plan for one mesh and one set of sample axes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from convoy.errors import ConvoyError
from convoy.planner.cost.prediction import most, rank_memory
from convoy.planner.search.elimination import Elimination, Table, TooWideError, restricted
from convoy.planner.search.layers import Groups, Layers, alone, in_common, tied, tied_where_wide
from convoy.planner.search.prices import Prices, Strategy, used_axes
from convoy.planner.search.problem import Choice, Problem, assigned, build
from convoy.planner.workload import Workload
from convoy.plans.mesh import Mesh
from convoy.plans.place import Batch
from convoy.plans.plan import Plan

LIMIT = 20_000_000  # the most entries of a table: 64 MB


@dataclass(frozen=True)
class Solution:
    """A plan and what it is predicted to cost: a least sum, and what gives it."""

    strategies: dict[str, Strategy]  # of every layer
    seconds: float  # the sum of its costs
    redistributions: int  # how often it brings a tensor from one layout to another
    bytes: float  # on rank 0, as far as they add up
    problem: Problem
    elimination: Elimination
    solver: "Solver"

    @property
    def mesh(self) -> Mesh:
        return self.solver.batch.mesh

    @cached_property
    def plan(self) -> Plan:
        return self.solver.layers.plan(self.mesh, self.strategies)

    @cached_property
    def memory(self) -> float:
        """Bytes on the rank that needs most; counted when first asked for."""
        solver = self.solver
        return most(rank_memory(solver.workload.place(self.plan), solver.prices.costs.costs)).total

    @property
    def is_of_its_axes(self) -> bool:
        """Whether some layer uses each of the sample axes; else it is a plan of fewer axes."""
        return used_axes(self.strategies, self.solver.layers.ops) == self.solver.batch.axes

    @property
    def rank(self) -> tuple[float, int]:
        """Of equally fast ones, that with fewer axes comes first."""
        return float(f"{self.seconds:.10g}"), len(self.mesh.sizes)


class Solver:
    """Finds the best plan on one mesh, where the samples are divided over the axes of a batch. `groups` are layers that
    have one strategy together, by default each by itself but where too many features meet."""

    def __init__(
        self, prices: Prices, batch: Batch, workload: Workload, layers: Layers, groups: Groups | None = None
    ) -> None:
        self.prices, self.batch, self.workload, self.layers = prices, batch, workload, layers
        self.allowed = layers.allowed(batch.mesh, batch, prices)
        graph = workload.graph
        self.groups = groups or tied_where_wide(alone(graph), graph, 3 if len(batch.mesh.sizes) < 2 else 2)
        self._problem: Problem | None = None

    def solve(self, time_price: float = 1.0, byte_price: float = 0.0) -> Solution:
        """The least sum of seconds, times a factor, and of bytes at a price in seconds each. A ConvoyError with a
        rule's sentence where there is no plan."""
        while True:
            choices = [Choice(group, in_common(group, self.allowed)) for group in self.groups]
            try:
                if self._problem is None:
                    self._problem = build(self.prices, self.batch, choices, self.workload.outputs)
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
                self._problem, self.groups = None, tied(self.groups, met, self.workload.graph)
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
