"""The best plan for one mesh and one set of sample axes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convoy.errors import ConvoyError
from convoy.planner.search.elimination import Elimination, Table, TooWideError
from convoy.planner.search.layers import Groups, alone, in_common, tied, tied_where_wide
from convoy.planner.search.prices import Strategy
from convoy.planner.search.problem import Choice, Problem, Shared, assigned, build
from convoy.plans.place import Batch

LIMIT = 20_000_000  # the most entries of a table: 64 MB
_ONLY = 1e-6  # the price of a second, where only what it is not counts


@dataclass(frozen=True)
class Solution:
    """A least sum and what gives it."""

    layers: dict[str, Strategy]
    seconds: float
    redistributions: int  # how often a tensor is brought from one layout to another
    bytes: float  # on rank 0; 0 where nobody asked
    problem: Problem
    elimination: Elimination


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

    def solve(self, time_price: float = 1.0, byte_price: float = 0.0, redistribution_price: float = 0.0) -> Solution:
        """The least sum of seconds, times a factor, and of bytes and redistributions at a price in seconds each. A
        ConvoyError with a rule's sentence where there is no plan."""
        while True:
            choices = [Choice(group, in_common(group, self.allowed)) for group in self.groups]
            try:
                if self._problem is None:
                    self._problem = build(self._shared, self.batch, choices, self._outputs, self._with_memory)
                problem = self._problem
                priced = [(problem.seconds, time_price), (problem.bytes, byte_price)]
                tables = [
                    table if price == 1 else Table(table.scope, table.numbers * price)
                    for part, price in (*priced, (problem.redistributions, redistribution_price))
                    for table in part
                    if price
                ]
                elimination = Elimination(tables, problem.sizes, LIMIT)
                break
            except TooWideError as error:
                met = [layer for v in error.scope if v < len(choices) for layer in choices[v].layers]
                self._problem, self.groups = None, tied(self.groups, met, self._shared.prices.graph)
        if not np.isfinite(elimination.least):
            raise problem.refused or ConvoyError("no plan divides this network over these devices")
        states = elimination.assignment()
        seconds, held, count = (_at(part, states) for part in (problem.seconds, problem.bytes, problem.redistributions))
        return Solution(assigned(choices, states), seconds, round(count), held, problem, elimination)

    def simplest(self, solution: Solution, budget: float) -> Solution:
        """The plan of fewest redistributions within a budget of seconds, among those on the convex hull of both.

        Between the best plan that keeps the budget and one that does not, the price for a redistribution at which both
        cost the same leads to a plan below the line through them, or to none (Handler and Zang, 1980).
        """
        fits, beyond = solution, self.solve(time_price=_ONLY, redistribution_price=1.0)
        if beyond.seconds <= budget:
            return replace(beyond, elimination=solution.elimination)
        while fits.redistributions > beyond.redistributions:
            price = (beyond.seconds - fits.seconds) / (fits.redistributions - beyond.redistributions)
            between = self.solve(redistribution_price=price)
            below = fits.seconds - between.seconds + price * (fits.redistributions - between.redistributions)
            if below <= 1e-9 * budget:
                break
            fits, beyond = (between, beyond) if between.seconds <= budget else (fits, between)
        return replace(fits, elimination=solution.elimination)


def _at(tables: Iterable[Table], states: Mapping[int, int]) -> float:
    return float(sum(table.numbers[tuple(states[v] for v in table.scope)] for table in tables))
