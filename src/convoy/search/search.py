"""The search: the fastest plans of a network for a number of devices, by costs that add up."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Graph, Ref
from convoy.graph.tree import leaves
from convoy.plans.layout import balanced
from convoy.plans.mesh import Axes, Mesh
from convoy.plans.place import Placement, place, sample_axes
from convoy.plans.plan import Plan
from convoy.plans.rules import Batch
from convoy.search.costs import Costs
from convoy.search.fixes import Fix, fix_of, parse_fixes
from convoy.search.legal import allowed
from convoy.search.memory import Fitting, fitting, nothing_fits
from convoy.search.patterns import compact
from convoy.search.placing import Shared
from convoy.search.prices import Prices, is_choosing
from convoy.search.result import Candidate, SearchResult
from convoy.search.solve import INTERESTING, Solution, Solver, UninterestingError, used_axes, using_all_axes
from convoy.search.space import AXIS_STRATEGIES, Strategy, meshes, sample_axes_of, strategies
from convoy.search.ties import Groups

__all__ = ["Parts", "SearchResult", "search"]

Parts = Callable[[int], tuple[range, ...]]
"""The consecutive samples of each of so many ranks. Raises ConvoyError where there cannot be so many."""

TOLERANCE = 0.01
"""Plans that are predicted to take so much longer than the fastest, as a share, count as equally fast: predictions are
not better than that, and the fastest of very many is the one whose prediction errs most in its favour."""


def search(
    graph: Graph,
    num_devices: int,
    costs: Costs,
    *,
    parts: Parts | None = None,
    outputs: Iterable[str] | None = None,
    fixes: Iterable[str | Fix] = (),
    memory_limit: float | None = None,
    top: int = 3,
    on: Sequence[Mesh] | None = None,
    among: Sequence[str] = AXIS_STRATEGIES,
    tolerance: float = TOLERANCE,
) -> SearchResult:
    """The simplest of the plans of a network whose costs add up to least, but for a tolerance.

    Of all plans that take at most 1 + `tolerance` times as long as the fastest, the first candidate is one with the
    fewest redistributions of a tensor, and of these the fastest (of equally fast ones, the one with fewer axes): a
    plan that sends more between layers has to be predicted to save more than predictions err. Under a limit of memory
    that these do not keep, the tolerance is 0.

    Args:
        graph: the network in training, captured at the whole batch of one pass.
        num_devices: ranks that the plans are for.
        costs: of calls, transfers and parameters.
        parts: how the samples are divided over a number of ranks; None divides them as evenly as can be.
        outputs: names of the values that the network returns; None takes those of the graph.
        fixes: strategies that are given, such as `classifier.*=filter`; the first that matches a layer counts.
        memory_limit: bytes that each rank has.
        top: how many candidates to give at most; plain `sample` comes on top of these.
        on: meshes to search; None searches those with one and two axes.
        among: strategies that layers may have on an axis, where no fix says otherwise.
        tolerance: a share of the fastest plan's seconds, at most 0.1.

    Raises:
        ConvoyError: a fix matches nothing or cannot be; or nothing fits into memory, and the sentence says by how much.
    """
    return _Search(graph, num_devices, costs, parts, outputs, tuple(fixes), memory_limit, on, among, tolerance).run(top)


@dataclass(frozen=True)
class _Found:
    """The best plan of a mesh and its sample axes.

    Attributes:
        free: the best one where the samples need not be divided over all of these axes.
    """

    solver: Solver
    mesh: Mesh
    solution: Solution
    free: Solution


class _Search:
    def __init__(
        self,
        graph: Graph,
        num_devices: int,
        costs: Costs,
        parts: Parts | None,
        outputs: Iterable[str] | None,
        fixes: Sequence[str | Fix],
        memory_limit: float | None,
        on: Sequence[Mesh] | None,
        among: Sequence[str],
        tolerance: float,
    ) -> None:
        assert 0 <= tolerance <= INTERESTING - 1
        self.among = among
        self.tolerance = tolerance
        self.graph = graph
        self.costs = costs
        self.num_samples = graph.shape(graph.inputs[0])[0]
        self.parts = parts or (lambda count: balanced(self.num_samples, count))
        self.outputs = list(outputs) if outputs is not None else [ref.name for ref in leaves(graph.output, Ref)]
        self.layers: dict[str, list[Call]] = {}
        for call in graph.calls:
            if is_choosing(call):
                self.layers.setdefault(call.layer, []).append(call)
        self.ops = {
            layer: next((c.op for c in calls if c.op != "random"), "random") for layer, calls in self.layers.items()
        }
        self.fixes = parse_fixes(fixes, self.ops)
        self.memory_limit = memory_limit
        self.meshes = list(on) if on is not None else meshes(num_devices)
        self.notes: list[str] = []
        self.refused: ConvoyError | None = None
        self.known = self.least = float("inf")
        self.plain: Solver | None = None
        self.solvers: list[Solver] = []
        self.with_memory = False

    def run(self, top: int) -> SearchResult:
        chosen = self._all()
        if self.memory_limit is not None and self._needs(chosen[0]) <= self.memory_limit:
            # what is fastest of all fits; of the others, those that do too
            chosen = [chosen[0], *(one for one in chosen[1 : 2 * top] if self._needs(one) <= self.memory_limit)]
        elif self.memory_limit is not None:
            self.with_memory, self.tolerance = True, 0.0
            chosen = self._fit(self._all())
        candidates: list[Candidate] = []
        for one in chosen:
            # the same plan with the axes exchanged costs the same, where links are alike
            same = any(math.isclose(one.solution.seconds, other.seconds, rel_tol=1e-9) for other in candidates)
            if len(candidates) < top and not same:
                plan = self._plan(one.mesh, one.solution.layers)
                candidates.append(Candidate(plan, one.solution.seconds, one.solution.redistributions, self._memory))
        plain = self._plain()
        if plain is not None and all(plain.plan != other.plan for other in candidates):
            candidates = [candidates[0], *sorted([*candidates[1:], plain], key=lambda candidate: candidate.seconds)]
        ties = max(([g for g in solver.groups if len(g) > 1] for solver in self.solvers), key=len, default=[])
        if ties:
            self.notes.append(_tied_sentence(ties))
        if any(solver.gave_up for solver in self.solvers):
            self.notes.append("not all plans that divide the samples over a part of the axes were looked at")
        return SearchResult(
            tuple(candidates), not self.notes, tuple(self.notes), tuple(self.meshes), self.least, chosen[0].solution
        )

    def _all(self) -> list[_Found]:
        """The best plans of all meshes and ways to divide the samples, the fastest first.

        Raises:
            ConvoyError: there is none.
        """
        self.solvers, self.known = [], float("inf")
        found = [one for mesh in self.meshes for one in self._on(mesh)]
        if not found:
            raise self.refused or ConvoyError("no plan divides this network over these devices")
        self.least = min(one.solution.seconds for one in found)
        found = [self._simplest(one) for one in found]
        near = [one for one in found if one.solution.seconds <= self.least * (1 + self.tolerance) * (1 + 1e-9)]
        best = min(near, key=lambda one: (one.solution.redistributions if self.tolerance else 0, *_rank(one)))
        others = sorted((one for one in found if one is not best and not self._is_flat(one)), key=_rank)
        return [best, *others]

    def _simplest(self, one: _Found) -> _Found:
        """With fewer redistributions, where that takes hardly longer than the fastest of all, or of its kind."""
        budget = self.least * (1 + self.tolerance)
        if not self.tolerance or one.solution.seconds > budget * INTERESTING:
            return one
        if one.solution.seconds > budget:  # it is another candidate, and simple for what it is
            budget = one.solution.seconds * (1 + self.tolerance)
        for start in (one.free, one.solution) if one.free is not one.solution else (one.free,):
            simple = one.solver.simplest(start, budget)
            if used_axes(simple.layers, self.ops) == one.solver.batch.axes:
                return _Found(one.solver, one.mesh, simple, one.free)
        return one

    def _needs(self, one: _Found) -> float:
        return self._memory_of(one.mesh, one.solution.layers)

    def _on(self, mesh: Mesh) -> list[_Found]:
        """The best plans on a mesh, one for each set of sample axes for which there is one."""
        shared = Shared(Prices(self.graph, mesh, self.costs))
        solved: dict[Axes, _Found] = {}
        groups: Groups | None = None
        for axes in sample_axes_of(mesh):
            solver = self._solver(mesh, axes, shared, groups)
            if solver is None:
                continue
            if len(mesh.sizes) == 1 and axes:
                self.plain = solver
            if any(other.solver.floor(solver.batch) >= self.known * INTERESTING for other in solved.values()):
                continue
            try:
                solution = solver.solve()
                solved[axes] = _Found(solver, mesh, solution, solution)
                self.known = min(self.known, solved[axes].solution.seconds)
            except UninterestingError:
                pass
            except ConvoyError as error:
                self.refused = error
            groups = solver.groups  # what was too wide before will be so again
        found = []
        for axes, one in solved.items():
            used = used_axes(one.solution.layers, self.ops)
            if used != axes:
                # a plan that leaves an axis unused is one of fewer sample axes, and at least as cheap there
                enough = min((other.solution.seconds for a, other in solved.items() if set(a) < set(axes)), default=0.0)
                better = using_all_axes(one.solver, one.solution, self.ops, enough * (1 + self.tolerance))
                if better is None:
                    continue
                one = _Found(one.solver, mesh, better, one.free)
            found.append(one)
        return found

    def _solver(self, mesh: Mesh, axes: Axes, shared: Shared, groups: Groups | None) -> Solver | None:
        count = mesh.size(axes)
        if count > self.num_samples:
            return None
        try:
            batch = Batch(mesh, axes, self.parts(count))
            choices = self._allowed(mesh, batch, shared.prices)
        except ConvoyError as error:
            self.refused = error
            return None
        enough = self.known * INTERESTING
        solver = Solver(shared, batch, choices, self.outputs, groups, self.with_memory, enough, self.tolerance)
        self.solvers.append(solver)
        return solver

    def _allowed(self, mesh: Mesh, batch: Batch, prices: Prices) -> dict[str, Sequence[Strategy]]:
        """What each layer may have.

        Raises:
            ConvoyError: some layer can have nothing of what it must have.
        """
        everything = strategies(mesh, batch.axes, self.among)
        known: dict[object, Sequence[Strategy]] = {}
        found: dict[str, Sequence[Strategy]] = {}
        for layer, calls in self.layers.items():
            fix = fix_of(layer, self.fixes)
            fixed = fix.on(mesh, self.ops[layer]) if fix else None
            if fix and fixed is None:
                raise ConvoyError(
                    f"the fix {fix} has {len(fix.strategies)} strategies, and no mesh that was searched has as many "
                    f"axes: write one strategy, or one for each axis"
                )
            if fixed is not None and any(s == "sample" and a not in batch.axes for a, s in enumerate(fixed)):
                raise ConvoyError(f"the fix {fix} needs a batch that can be divided over {mesh}: choose a larger batch")
            key = (tuple(map(prices.kind, calls)), fixed)
            if key not in known:
                given = everything if fixed is None else [fixed]
                known[key] = allowed(prices, batch, calls, given, narrow=fixed is None)
            found[layer] = known[key]
        return found

    def _is_flat(self, one: _Found) -> bool:
        """Whether a plan on two axes has the same strategies on both: with one axis instead it is simpler, and there it
        was searched too."""
        flat = any(len(mesh.sizes) == 1 for mesh in self.meshes)
        return flat and len(one.mesh.sizes) > 1 and all(len(set(s)) == 1 for s in one.solution.layers.values())

    def _fit(self, found: Sequence[_Found]) -> list[_Found]:
        """Those that fit into memory, each made smaller where it must be.

        Raises:
            ConvoyError: none does.
        """
        assert self.memory_limit is not None
        tried: list[tuple[_Found, Fitting]] = []
        for one in found:
            fit = fitting(one.solver, one.solution, self.memory_limit, partial(self._memory_of, one.mesh))
            tried.append((_Found(one.solver, one.mesh, fit.solution, one.free), fit))
        fits = sorted(((one, fit) for one, fit in tried if fit.fits), key=lambda pair: pair[0].solution.seconds)
        if not fits:
            least, fit = min(tried, key=lambda pair: pair[1].memory)
            placement = self._place(self._plan(least.mesh, fit.solution.layers))
            raise nothing_fits(placement, self.costs, fit.memory, self.memory_limit)
        bound = min(fit.bound for _, fit in tried)
        first = fits[0][0].solution.seconds
        if bound < first * (1 - 1e-9):
            self.notes.append(
                f"the memory limit leaves a gap: a plan that fits could take up to {1 - bound / first:.2%} less time"
            )
        return [one for one, _ in fits]

    def _plain(self) -> Candidate | None:
        """Every layer by samples on one axis, where that is legal, fits, and is not fixed otherwise."""
        plain = ("sample",)
        solver = self.plain
        if solver is None or not all(plain in allowed for allowed in solver.allowed.values()):
            return None
        layers = dict.fromkeys(solver.allowed, plain)
        candidate = Candidate(self._plan(solver.batch.mesh, layers), *solver.price(layers), self._memory)
        return candidate if self.memory_limit is None or candidate.memory <= self.memory_limit else None

    def _plan(self, mesh: Mesh, layers: Mapping[str, Strategy]) -> Plan:
        plan = compact(mesh, {layer: layers[layer] for layer in self.layers})
        assert all(plan.strategy(layer, op) == layers[layer] for layer, op in self.ops.items())
        return plan

    def _memory(self, plan: Plan) -> float:
        return self.costs.memory(self._place(plan))

    def _memory_of(self, mesh: Mesh, layers: Mapping[str, Strategy]) -> float:
        return self._memory(self._plan(mesh, layers))

    def _place(self, plan: Plan) -> Placement:
        axes = sample_axes(((call.layer, call.op) for call in self.graph.calls), plan)
        batch = Batch(plan.mesh, axes, self.parts(plan.mesh.size(axes)))
        return place(self.graph, plan, batch, self.outputs)


def _rank(one: _Found) -> tuple[float, int]:
    """Of plans that cost the same, the one with fewer axes."""
    return float(f"{one.solution.seconds:.10g}"), len(one.mesh.sizes)


def _tied_sentence(ties: Sequence[Sequence[str]]) -> str:
    layers = sum(map(len, ties))
    many = f"{len(ties)} strategies" if len(ties) > 1 else "one strategy"
    return (
        f"{layers} layers were given {many} between them, one for all layers of a role (as {ties[0][0]} and "
        f"{ties[0][-1]}), because too many features meet there to choose for each by itself"
    )
