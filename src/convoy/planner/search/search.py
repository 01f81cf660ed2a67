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

Which function does which:

    Layers.allowed (layers.py)        strategies that the rules do not refuse and that differ from each other
    Prices (prices.py)                asks rules and costs once for all calls that are alike
    build (problem.py)                the sum as tables over variables: one for each layer, one for a layout where that
                                      says less than the layers that decide about it
    Elimination (elimination.py)      the least sum of tables: exact, one variable after the other
    tied (layers.py)                  where many features meet, layers of one role share a strategy; noted
    Solver.solve (solve.py)           all of these for one mesh and one set of sample axes
    Solver.simplest (solve.py)        the fewest redistributions within a budget of seconds
    fitting (memory.py)               a price for bytes, raised until the plan fits: Lagrange multipliers
    search (here)                     all meshes, and the order of the candidates

Brute force over all plans of small networks holds the result: `tests/planner/search/test_exact.py`.
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from convoy.errors import ConvoyError
from convoy.planner.cost.additive import Additive, additive_seconds
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.prediction import most, rank_memory
from convoy.planner.search.layers import Groups, Layers
from convoy.planner.search.memory import fitting, nothing_fits
from convoy.planner.search.prices import AXIS_STRATEGIES, Prices, Strategy, floor, meshes, sample_axes_of, used_axes
from convoy.planner.search.problem import Shared
from convoy.planner.search.solve import Solution, Solver
from convoy.planner.workload import Workload
from convoy.plans.fit import Fix
from convoy.plans.mesh import Mesh
from convoy.plans.place import Batch
from convoy.plans.plan import Plan
from convoy.plans.traffic import redistributions

# Plans that are predicted to take so much longer than the fastest, as a share, count as equally fast: predictions are
# not better than that, and the fastest of very many is the one whose prediction errs most in its favour
TOLERANCE = 0.01


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
    exact: bool  # no plan on the meshes that were searched costs less than `least`
    notes: tuple[str, ...]  # sentences about what was left out or tied, empty where `exact`
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


def search(
    workload: Workload,
    num_devices: int,
    costs: Costs,
    *,
    fixes: Iterable[str | Fix] = (),
    memory_limit: float | None = None,
    top: int = 3,
    on: Sequence[Mesh] | None = None,
    among: Sequence[str] = AXIS_STRATEGIES,
    tolerance: float = TOLERANCE,
) -> SearchResult:
    """The simplest of the plans of a network whose costs add up to least, but for a tolerance.

    Of the plans that take at most 1 + `tolerance` times as long as the fastest, the first candidate is one with the
    fewest redistributions of a tensor, and of these the fastest (of equally fast ones, the one with fewer axes): a plan
    that sends more between layers has to be predicted to save more than predictions err. Under a limit of memory that
    these do not keep, the tolerance is 0.

    The first fix that matches a layer counts; `among` are the strategies on an axis where none does. `memory_limit` is
    in bytes of a rank, `on` the meshes to search, by default those with one and two axes. Plain `sample` comes on top
    of the `top` candidates. A ConvoyError where a fix matches nothing or cannot be, or nothing fits into memory, by how
    much.
    """
    searching = _Search(
        workload=workload,
        costs=costs,
        layers=Layers(workload.graph, tuple(fixes), among),
        memory_limit=memory_limit,
        meshes=list(on) if on is not None else meshes(num_devices),
        tolerance=tolerance,
    )
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
    costs: Costs
    layers: Layers
    memory_limit: float | None
    meshes: list[Mesh]
    tolerance: float
    notes: list[str] = field(default_factory=list)
    least: float = float("inf")
    solvers: list[Solver] = field(default_factory=list)  # one for each mesh and way to divide the samples
    known: float = float("inf")  # seconds of the fastest plan found so far
    is_counted: bool = True
    refused: ConvoyError | None = None  # why the last way that was refused cannot be

    def __post_init__(self) -> None:
        self.sums = Additive(self.costs, self.workload.graph, self.workload.passes)

    def run(self, top: int) -> SearchResult:
        chosen = self._all()
        if self.memory_limit is not None and self._needs(chosen[0]) <= self.memory_limit:
            # what is fastest of all fits; of the others, those that do too
            chosen = [chosen[0], *(one for one in chosen[1 : 2 * top] if self._needs(one) <= self.memory_limit)]
        elif self.memory_limit is not None:
            self.tolerance = 0.0
            chosen = self._fit(self._all(with_memory=True))
        candidates: list[Candidate] = []
        for one in chosen:
            # the same plan with the axes exchanged costs the same, where links are alike
            same = any(math.isclose(one.seconds, other.seconds, rel_tol=1e-9) for other in candidates)
            if len(candidates) < top and not same:
                plan = self.layers.plan(one.mesh, one.layers)
                candidates.append(Candidate(plan, one.seconds, one.redistributions, self._memory))
        plain = self._plain()
        if plain is not None and all(plain.plan != other.plan for other in candidates):
            candidates = [candidates[0], *sorted([*candidates[1:], plain], key=lambda candidate: candidate.seconds)]
        ties = max(([g for g in solver.groups if len(g) > 1] for solver in self.solvers), key=len, default=[])
        if ties:
            self.notes.append(_tied_sentence(ties))
        if not self.is_counted:
            self.notes.append(
                "not all plans that are about as fast as the fastest were compared by how often they redistribute: too "
                "many features meet for that"
            )
        return SearchResult(tuple(candidates), not self.notes, tuple(self.notes), self.least, chosen[0])

    def _all(self, with_memory: bool = False) -> list[Solution]:
        """The best plans of all meshes and ways to divide the samples, the fastest first; a ConvoyError where there is
        none."""
        self.solvers.clear()
        self.known, self.is_counted = float("inf"), True
        solutions = [one for mesh in self.meshes for one in self._on(mesh, with_memory)]
        if not solutions:
            raise self.refused or ConvoyError("no plan divides this network over these devices")
        self.least = min(one.seconds for one in solutions)
        solutions = [self._simplest(one) for one in solutions]
        near = [one for one in solutions if one.seconds <= self.least * (1 + self.tolerance) * (1 + 1e-9)]
        best = min(near, key=lambda one: (one.redistributions if self.tolerance else 0, *_rank(one)))
        rest = sorted((one for one in solutions if one is not best and not self._is_flat(one)), key=_rank)
        return [best, *rest]

    def _on(self, mesh: Mesh, with_memory: bool) -> Iterator[Solution]:
        """The best plans on a mesh, one for each set of sample axes that divide the samples in the best plan for it.
        One that leaves an axis unused is a plan of fewer axes, and at least as cheap there."""
        shared = Shared(Prices(self.workload.graph, mesh, self.sums))
        groups: Groups | None = None
        for axes in sample_axes_of(mesh):
            if mesh.size(axes) > self.workload.samples:
                continue
            try:
                batch = Batch(mesh, axes, self.workload.parts(mesh.size(axes)))
                allowed = self.layers.allowed(mesh, batch, shared.prices)
                solver = Solver(shared, batch, allowed, self.workload.outputs, groups, with_memory)
                self.solvers.append(solver)
                # where layers are tied it takes long to search a way whose computing alone is slower than a known plan
                if len(solver.groups) < len(allowed) and floor(shared.prices, batch, allowed) > _FAR * self.known:
                    continue
                solution = solver.solve()
                self.known = min(self.known, solution.seconds)
            except ConvoyError as error:
                self.refused = error
                continue
            groups = solver.groups  # what was too wide before will be so again
            if used_axes(solution.layers, self.layers.ops) == axes:
                yield solution

    def _simplest(self, one: Solution) -> Solution:
        """A plan of fewer redistributions, where that takes hardly longer than the fastest of all or of its kind."""
        is_near = one.seconds <= self.least * (1 + self.tolerance)
        fastest = self.least if is_near else one.seconds
        if not self.tolerance or fastest > _FAR * self.least:
            return one
        simple = one.solver.simplest(one, fastest * (1 + self.tolerance))
        self.is_counted = self.is_counted and (simple is not None or not is_near)
        if simple is None or used_axes(simple.layers, self.layers.ops) != one.solver.batch.axes:
            return one
        return simple

    def _needs(self, one: Solution) -> float:
        return self._memory(self.layers.plan(one.mesh, one.layers))

    def _is_flat(self, one: Solution) -> bool:
        """Whether a plan on two axes has the same strategies on both: with one axis instead it is simpler, and there it
        was searched too."""
        flat = any(len(mesh.sizes) == 1 for mesh in self.meshes)
        return flat and len(one.mesh.sizes) > 1 and all(len(set(s)) == 1 for s in one.layers.values())

    def _fit(self, solutions: Sequence[Solution]) -> list[Solution]:
        """The plans that fit into memory, each made smaller where it must be; a ConvoyError where none does."""
        assert self.memory_limit is not None
        tried = [fitting(one, self.memory_limit, self._needs) for one in solutions]
        fits = sorted((fit for fit in tried if fit.fits), key=lambda fit: fit.solution.seconds)
        if not fits:
            least = min(tried, key=lambda fit: fit.memory)
            placement = self.workload.place(self.layers.plan(least.solution.mesh, least.solution.layers))
            raise nothing_fits(placement, self.costs, least.memory, self.memory_limit)
        bound, first = min(fit.bound for fit in tried), fits[0].solution.seconds
        if bound < first * (1 - 1e-9):
            self.notes.append(
                f"the memory limit leaves a gap: a plan that fits could take up to {1 - bound / first:.2%} less time"
            )
        return [fit.solution for fit in fits]

    def _plain(self) -> Candidate | None:
        """Every layer by samples on one axis, where that is legal, fits, and is not fixed otherwise."""
        plain = ("sample",)
        for solver in self.solvers:
            if len(solver.batch.mesh.sizes) == 1 and all(plain in options for options in solver.allowed.values()):
                plan = self.layers.plan(solver.batch.mesh, dict.fromkeys(solver.allowed, plain))
                placement = self.workload.place(plan)
                seconds, count = additive_seconds(placement, self.sums), sum(1 for _ in redistributions(placement))
                candidate = Candidate(plan, seconds, count, self._memory)
                if self.memory_limit is None or candidate.memory <= self.memory_limit:
                    return candidate
        return None

    def _memory(self, plan: Plan) -> float:
        return most(rank_memory(self.workload.place(plan), self.costs)).total


def _rank(one: Solution) -> tuple[float, int]:
    return float(f"{one.seconds:.10g}"), len(one.mesh.sizes)


def _tied_sentence(ties: Sequence[Sequence[str]]) -> str:
    layers = sum(map(len, ties))
    many = f"{len(ties)} strategies" if len(ties) > 1 else "one strategy"
    return (
        f"{layers} layers were given {many} between them, one for all layers of a role (as {ties[0][0]} and "
        f"{ties[0][-1]}), because too many features meet there to choose for each by itself"
    )
