"""The fastest plans of a network for a number of devices, exact where the network allows it.

Minimized is the sum, over one update, of

    seconds of every call under its strategy                     Additive.compute
  + seconds to bring every tensor to each layout that is wanted  Additive.transfer, once for all readers of one layout
  + seconds to add up the gradient of every parameter,
    and of the optimizer for a rank's part of it                 Additive.parameter

over a mesh (every ordered factorization of the devices into one or two axes), the set of its axes that divide the
samples, and for every layer one strategy on each axis. The operations (`ops`) say which strategies a
layer can have, and in which layouts it takes and gives its tensors. Constraints: fixes of the user; with a memory
limit, at most so many bytes on the rank that needs most. Of the plans within `TOLERANCE` of the least sum, the one with
the fewest redistributions is taken.

Brute force over all plans of small networks holds the result: `tests/planner/search/test_exact.py`.
"""

import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from convoy.errors import ConvoyError
from convoy.planner.cost.additive import Additive
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.prediction import most, nothing_fits, rank_memory
from convoy.planner.search.elimination import Elimination, Table, TooWideError, restricted
from convoy.planner.search.layers import ANY, Constraints, Groups, Layers, alone, in_common, tied, tied_where_wide
from convoy.planner.search.prices import Prices, Strategy, meshes, sample_axes_of
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
        """Whether some layer with weights is divided by samples on each of the sample axes; else it is a plan of fewer
        axes."""
        ops = self.solver.layers.ops
        rows = [strategy for layer, strategy in self.strategies.items() if ops[layer] != "random"]
        return tuple(a for a in self.mesh.axes if any(row[a] == "sample" for row in rows)) == self.solver.batch.axes

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
        most = 3 if len(batch.mesh.sizes) < 2 else 2
        self.groups = groups or tied_where_wide(alone(graph), graph, layers.roles, most)
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
                self._problem, self.groups = None, tied(self.groups, met, self.layers.roles)
        states = elimination.assignment()
        if not np.isfinite(elimination.least) or states is None:
            raise problem.refused or ConvoyError("no plan divides this network over these devices")
        return self._solution(problem, elimination, states)

    def _solution(self, problem: Problem, elimination: Elimination, states: Mapping[int, int]) -> Solution:
        seconds, held, count = (_at(part, states) for part in (problem.seconds, problem.bytes, problem.redistributions))
        return Solution(assigned(problem.choices, states), seconds, round(count), held, problem, elimination, self)

    def simplest(self, solution: Solution, budget: float) -> Solution:
        """Of the plans within a budget of seconds, the fastest of those with fewest redistributions; `solution`, the
        fastest, whose seconds the budget is at least, where the tables that count them would be too large."""
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
            return solution
        simple = counting.assignment(budget)
        if simple is None:
            return solution
        return self._solution(problem, solution.elimination, {v: states_of[v][state] for v, state in simple.items()})


def _at(tables: Iterable[Table], states: Mapping[int, int]) -> float:
    return float(sum(table.numbers[tuple(states[v] for v in table.scope)] for table in tables))


_ROUNDS, _ONLY_BYTES = 24, 1e-12


def fitting(fastest: Solution, limit: float) -> tuple[Solution, float]:
    """The fastest plan found for ranks with `limit` bytes, or the smallest where none fits, and the seconds that no
    plan that fits falls below, as far as bytes add up; `fastest` is the best plan whatever it needs.

    Everett, "Generalized Lagrange multiplier method" (1963): the least sum of seconds and price × bytes is, among the
    plans of at most as many bytes, the fastest; and for every price, that sum less price × limit is a bound for all
    plans that fit. The price is raised until the plan fits.
    """
    if fastest.memory <= limit:
        return fastest, fastest.seconds
    solver, bound = fastest.solver, fastest.seconds
    best = smallest = solver.solve(byte_price=1.0, time_price=_ONLY_BYTES)
    if smallest.memory > limit:
        return smallest, bound
    # what is counted on rank 0 and what the busiest rank needs differ: the price is for bytes as they are counted
    counted_limit = limit * fastest.bytes / fastest.memory
    low, high = 0.0, max(smallest.seconds - fastest.seconds, 1e-9) / max(fastest.bytes - smallest.bytes, 1.0) * 1e3
    for _ in range(_ROUNDS):
        price = (low * high) ** 0.5 if low else high / 8
        solution = solver.solve(byte_price=price)
        bound = max(bound, solution.seconds + price * (solution.bytes - counted_limit))
        if solution.memory <= limit:
            high = price
            best = min(best, solution, key=lambda plan: plan.seconds)
        else:
            low = price
        if low and high / low < 1.01:
            break
    return best, min(bound, best.seconds)


# Plans that are predicted to take so much longer than the fastest, as a share, count as equally fast: predictions are
# not better than that, and the fastest of very many is the one whose prediction errs most in its favour
TOLERANCE = 0.01


@dataclass(frozen=True)
class NextBest:
    """Another strategy of a layer, and seconds by which an update would be longer with it."""

    strategy: Strategy
    extra_s: float


@dataclass(frozen=True)
class SearchResult:
    """The answer of a search."""

    # Different plans, the one to have first and then by their seconds: the best of a mesh and of a way to divide the
    # samples each
    candidates: tuple[Solution, ...]
    notes: tuple[str, ...]  # sentences about what was left out or tied
    least: float  # seconds of the fastest plan

    @property
    def exact(self) -> bool:
        """Whether no plan on the meshes that were searched costs less than `least`."""
        return not self.notes

    @property
    def best(self) -> Solution:
        return self.candidates[0]

    @cached_property
    def next_best(self) -> dict[str, NextBest]:
        """The second best strategy of every layer that can have one, all others chosen anew on the same mesh; worked
        out when first asked for. It may be faster than the best plan, by the search's tolerance at most, as that sends
        less."""
        best, found = self.best, dict[str, NextBest]()
        marginals = best.elimination.min_marginals()
        for v, choice in enumerate(best.problem.choices):
            sums = {s: float(n) for s, n in zip(choice.strategies, marginals[v], strict=True) if math.isfinite(n)}
            sums.pop(best.strategies[choice.layers[0]], None)
            if sums:
                other = min(sums, key=sums.__getitem__)
                found |= dict.fromkeys(choice.layers, NextBest(other, sums[other] - best.seconds))
        return found


def search(
    workload: Workload,
    num_devices: int,
    costs: Costs,
    constraints: Constraints = ANY,
    *,
    top: int = 3,
    tolerance: float = TOLERANCE,
) -> SearchResult:
    """The simplest of the plans of a network whose costs add up to least, but for a tolerance.

    Of the plans that take at most 1 + `tolerance` times as long as the fastest, the first candidate is one with the
    fewest redistributions of a tensor, and of these the fastest (of equally fast ones, the one with fewer axes): a plan
    that sends more between layers has to be predicted to save more than predictions err. Under a limit of memory that
    these do not keep, the tolerance is 0. A ConvoyError where a fix matches nothing or cannot be, or nothing fits into
    memory, by how much.
    """
    searching = _Search(workload, num_devices, costs, constraints, tolerance)
    # very many small objects and no cycles: the search for these is a third of the time
    collects = gc.isenabled()
    gc.disable()
    try:
        return searching.run(top)
    finally:
        if collects:
            gc.enable()


_FAR = 1.1  # plans that take so many times as long as the fastest are candidates as they are found


@dataclass
class _Search:
    workload: Workload
    num_devices: int
    costs: Costs
    constraints: Constraints
    tolerance: float
    notes: list[str] = field(default_factory=list)
    least: float = math.inf  # seconds of the fastest plan
    ties: list[Sequence[str]] = field(default_factory=list)  # layers that have one strategy, on the mesh that has most
    refused: dict[int, ConvoyError] = field(default_factory=dict)  # why it cannot be, by the number of sample axes

    def __post_init__(self) -> None:
        self.layers = Layers(self.workload.graph, self.constraints)
        self.meshes = meshes(self.num_devices) if self.constraints.meshes is None else list(self.constraints.meshes)
        self.sums = Additive(self.costs, self.workload.graph, self.workload.passes)

    def run(self, top: int) -> SearchResult:
        fastest = [solution for mesh in self.meshes for solution in self._on(mesh)]
        if not fastest:
            # with fewer axes, layers that are fixed by samples are refused whatever else is wrong
            nothing = ConvoyError("no plan divides this network over these devices")
            raise max(self.refused.items(), default=(0, nothing))[1]
        ranking, limit = self._ranked([self._simplest(solution) for solution in fastest]), self.constraints.memory_limit
        if limit is not None and ranking[0].memory > limit:
            self.tolerance = 0.0
            ranking = self._fit(self._ranked(fastest), limit)
        elif limit is not None:  # what is fastest of all fits; of the others, those that do too
            ranking = [ranking[0], *(solution for solution in ranking[1 : 2 * top] if solution.memory <= limit)]
        candidates: list[Solution] = []
        for solution in ranking:
            # the same plan with the axes exchanged costs the same, where links are alike
            same = any(math.isclose(solution.seconds, other.seconds, rel_tol=1e-9) for other in candidates)
            if len(candidates) < top and not same:
                candidates.append(solution)
        if self.ties:
            self.notes.append(_tied_sentence(self.ties))
        return SearchResult(tuple(candidates), tuple(self.notes), self.least)

    def _on(self, mesh: Mesh) -> Iterator[Solution]:
        """The best plans on a mesh, one for each set of sample axes that divide the samples in the best plan for it.
        One that leaves an axis unused is a plan of fewer axes, and at least as cheap there."""
        prices = Prices(self.workload.graph, mesh, self.sums)
        groups: Groups | None = None
        for axes in sample_axes_of(mesh):
            if mesh.size(axes) > self.workload.samples:
                continue
            number = -1  # a batch that so many ranks cannot share says least
            try:
                batch = Batch(mesh, axes, self.workload.parts(mesh.size(axes)))
                number = len(axes)
                solver = Solver(prices, batch, self.workload, self.layers, groups)
                solution = solver.solve()
            except ConvoyError as error:
                self.refused.setdefault(number, error)
                continue
            groups = solver.groups  # what was too wide before will be so again
            self.ties = max(self.ties, [group for group in groups if len(group) > 1], key=len)
            if solution.is_of_its_axes:
                self.least = min(self.least, solution.seconds)
                yield solution

    def _ranked(self, solutions: Sequence[Solution]) -> list[Solution]:
        """The plan to have, and then all by their seconds, but for those on two axes that have the same strategies on
        both: with one axis instead such a plan is simpler, and there it was searched too."""
        near = [
            solution for solution in solutions if solution.seconds <= self.least * (1 + self.tolerance) * (1 + 1e-9)
        ]
        best = min(near, key=lambda solution: (solution.redistributions if self.tolerance else 0, *solution.rank))
        flat = any(len(mesh.sizes) == 1 for mesh in self.meshes)
        rest = [
            solution
            for solution in solutions
            if solution is not best
            and not (
                flat and len(solution.mesh.sizes) > 1 and all(len(set(s)) == 1 for s in solution.strategies.values())
            )
        ]
        return [best, *sorted(rest, key=lambda solution: solution.rank)]

    def _simplest(self, solution: Solution) -> Solution:
        """A plan of fewer redistributions, where that takes hardly longer than the fastest of all or of its kind."""
        is_near = solution.seconds <= self.least * (1 + self.tolerance)
        fastest = self.least if is_near else solution.seconds
        if not self.tolerance or fastest > _FAR * self.least:
            return solution
        simple = solution.solver.simplest(solution, fastest * (1 + self.tolerance))
        return simple if simple.is_of_its_axes else solution

    def _fit(self, solutions: Sequence[Solution], limit: float) -> list[Solution]:
        """The plans that fit into memory, each made smaller where it must be; a ConvoyError where none does."""
        fittings = [fitting(solution, limit) for solution in solutions]
        fits = sorted((plan for plan, _ in fittings if plan.memory <= limit), key=lambda plan: plan.seconds)
        if not fits:
            least = min((plan for plan, _ in fittings), key=lambda plan: plan.memory)
            raise nothing_fits(self.workload.place(least.plan), self.costs, least.memory, limit)
        bound, first = min(bound for _, bound in fittings), fits[0].seconds
        if bound < first * (1 - 1e-9):
            self.notes.append(
                f"the memory limit leaves a gap: a plan that fits could take up to {1 - bound / first:.2%} less time"
            )
        return fits


def _tied_sentence(ties: Sequence[Sequence[str]]) -> str:
    layers = sum(map(len, ties))
    many = f"{len(ties)} strategies" if len(ties) > 1 else "one strategy"
    return (
        f"{layers} layers were given {many} between them, one for all layers of a role (as {ties[0][0]} and "
        f"{ties[0][-1]}), because too many features meet there to choose for each by itself"
    )
