"""The best plans of one mesh after the other, one for each way to divide the samples, and what a search answers."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from convoy.errors import ConvoyError
from convoy.graph.graph import Graph
from convoy.planner.search.layers import Groups, Layers
from convoy.planner.search.placing import Shared
from convoy.planner.search.prices import Costs, Prices, Strategy, sample_axes_of, used_axes
from convoy.planner.search.pruning import INTERESTING, UninterestingError
from convoy.planner.search.solve import Solution, Solver
from convoy.plans.mesh import Axes, Mesh
from convoy.plans.place import Batch
from convoy.plans.plan import Plan

_BRANCHES = 400


def using_all_axes(solver: Solver, solution: Solution, ops: Mapping[str, str], enough: float) -> Solution | None:
    """The best plan in which each of the solver's sample axes divides the samples of some layer; None where it takes
    `enough` seconds. The solver's costs hold only for such plans: others are plans of fewer sample axes. Branch and
    bound over which layer uses an axis that the best plan, `solution`, does not use."""
    axes = solver.batch.axes
    heap: list[tuple[float, int, Solution, dict[str, Sequence[Strategy]]]] = [(solution.seconds, 0, solution, {})]
    count = 0
    while heap and count < _BRANCHES:
        seconds, _, best, only = heapq.heappop(heap)
        if seconds >= enough:
            return None
        missing = sorted(set(axes) - set(used_axes(best.layers, ops)))
        if not missing:
            return best
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


@dataclass(frozen=True)
class Candidate:
    """A plan and what it is predicted to cost."""

    plan: Plan
    seconds: float  # the sum of its costs
    redistributions: int  # how often it brings a tensor from one layout to another
    measure: Callable[[Plan], float] = field(repr=False, compare=False)  # of bytes on the rank that needs most

    @cached_property
    def memory(self) -> float:
        """Bytes on the rank that needs most; counted when first asked for."""
        return self.measure(self.plan)


@dataclass(frozen=True)
class NextBest:
    """What a layer would cost with its second best strategy, all other layers chosen anew, on the same mesh."""

    layers: tuple[str, ...]  # mostly one; several where they are tied
    strategy: Strategy  # in the best plan, one for each axis
    other: Strategy | None  # the second best; None where they can have no other
    # Of the whole plan with `other`; infinite where there is none. It can be less than that of the best plan, by the
    # search's tolerance at most, which then sends less.
    seconds: float


@dataclass(frozen=True)
class SearchResult:
    """The answer of a search."""

    # Different plans, the one to have first and then by their seconds: the best of a mesh and of a way to divide the
    # samples each, and plain `sample` where it can be
    candidates: tuple[Candidate, ...]
    # No plan on the meshes that were searched costs less than `least`, and none within the tolerance has fewer
    # redistributions than the first candidate
    exact: bool
    notes: tuple[str, ...]  # sentences about what was left out or tied, empty where `exact`
    searched: tuple[Mesh, ...]
    least: float  # seconds of the fastest plan
    solution: Solution = field(repr=False, compare=False)  # of the best plan

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @cached_property
    def next_best(self) -> tuple[NextBest, ...]:
        """The second best strategies, layer by layer in the network's order; worked out when first asked for."""
        rows = []
        marginals = self.solution.elimination.min_marginals()
        for v, choice in enumerate(self.solution.problem.choices):
            chosen = self.solution.layers[choice.layers[0]]
            rivals = [(float(n), s) for n, s in zip(marginals[v], choice.strategies, strict=True) if s != chosen]
            seconds, other = min(rivals, default=(float("inf"), None), key=lambda pair: pair[0])
            rows.append(NextBest(choice.layers, chosen, other if seconds < float("inf") else None, seconds))
        return tuple(rows)


# The consecutive samples of each of so many ranks. Raises ConvoyError where there cannot be so many.
Parts = Callable[[int], tuple[range, ...]]


@dataclass(frozen=True)
class MeshSolution:
    """The best plan of a mesh and its sample axes."""

    solver: Solver
    mesh: Mesh
    solution: Solution
    free: Solution  # the best plan whose samples need not be divided over all of these axes


class MeshSearch:
    """Solves one mesh after the other; the best plans bound what is looked for next. Plans that take longer than the
    fastest by the share `tolerance` are to be found all the same."""

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        layers: Layers,
        parts: Parts,
        outputs: Sequence[str],
        with_memory: bool,
        tolerance: float,
    ) -> None:
        self._graph, self._costs, self._layers = graph, costs, layers
        self._num_samples = graph.shape(graph.inputs[0])[0]
        self._parts, self._outputs = parts, outputs
        self._with_memory, self._tolerance = with_memory, tolerance
        self._known = float("inf")
        self.solvers: list[Solver] = []  # one for each way to divide the samples
        self.plain: Solver | None = None  # of plain `sample` on one axis; None where that cannot be
        self.refused: ConvoyError | None = None  # why the last way that was refused cannot be

    def on(self, mesh: Mesh) -> list[MeshSolution]:
        """The best plans on a mesh, one for each set of sample axes for which there is one."""
        shared = Shared(Prices(self._graph, mesh, self._costs))
        solved: dict[Axes, MeshSolution] = {}
        groups: Groups | None = None
        for axes in sample_axes_of(mesh):
            solver = self._solver(mesh, axes, shared, groups)
            if solver is None:
                continue
            if len(mesh.sizes) == 1 and axes:
                self.plain = solver
            if any(other.solver.floor(solver.batch) >= self._known * INTERESTING for other in solved.values()):
                continue
            try:
                solution = solver.solve()
                solved[axes] = MeshSolution(solver, mesh, solution, solution)
                self._known = min(self._known, solved[axes].solution.seconds)
            except UninterestingError:
                pass
            except ConvoyError as error:
                self.refused = error
            groups = solver.groups  # what was too wide before will be so again
        return [one for one in (self._whole(axes, solved) for axes in solved) if one is not None]

    def _whole(self, axes: Axes, solved: dict[Axes, MeshSolution]) -> MeshSolution | None:
        """The solution for some axes, with all of them in use; None where fewer axes do better."""
        one, ops = solved[axes], self._layers.ops
        if used_axes(one.solution.layers, ops) == axes:
            return one
        # a plan that leaves an axis unused is one of fewer sample axes, and at least as cheap there
        enough = min((other.solution.seconds for a, other in solved.items() if set(a) < set(axes)), default=0.0)
        better = using_all_axes(one.solver, one.solution, ops, enough * (1 + self._tolerance))
        return MeshSolution(one.solver, one.mesh, better, one.free) if better is not None else None

    def _solver(self, mesh: Mesh, axes: Axes, shared: Shared, groups: Groups | None) -> Solver | None:
        count = mesh.size(axes)
        if count > self._num_samples:
            return None
        try:
            batch = Batch(mesh, axes, self._parts(count))
            choices = self._layers.allowed(mesh, batch, shared.prices)
        except ConvoyError as error:
            self.refused = error
            return None
        enough = self._known * INTERESTING
        solver = Solver(shared, batch, choices, self._outputs, groups, self._with_memory, enough, self._tolerance)
        self.solvers.append(solver)
        return solver
