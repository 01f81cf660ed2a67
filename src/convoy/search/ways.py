"""The best plans of a mesh: one for each way to divide the samples over its axes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from convoy.errors import ConvoyError
from convoy.graph.graph import Graph
from convoy.plans.mesh import Axes, Mesh
from convoy.plans.rules import Batch
from convoy.search.all_axes import using_all_axes
from convoy.search.costs import Costs
from convoy.search.layers import Layers
from convoy.search.placing import Shared
from convoy.search.prices import Prices
from convoy.search.pruning import INTERESTING, UninterestingError
from convoy.search.solve import Solution, Solver
from convoy.search.space import sample_axes_of, used_axes
from convoy.search.ties import Groups

Parts = Callable[[int], tuple[range, ...]]
"""The consecutive samples of each of so many ranks. Raises ConvoyError where there cannot be so many."""


@dataclass(frozen=True)
class Found:
    """The best plan of a mesh and its sample axes.

    Attributes:
        free: the best one where the samples need not be divided over all of these axes.
    """

    solver: Solver
    mesh: Mesh
    solution: Solution
    free: Solution


class Ways:
    """Solves one mesh after the other; what was found bounds what is looked for next.

    Args:
        graph: the network.
        costs: of calls, transfers and parameters.
        layers: what is chosen for.
        parts: how the samples are divided over a number of ranks.
        outputs: names of the values that the network returns.
        with_memory: whether bytes are counted too.
        tolerance: by this share plans may take longer than the fastest and are to be found all the same.

    Attributes:
        solvers: of all ways that were looked at.
        plain: that which knows plain `sample` on one axis; None where that cannot be.
        refused: why the last way that cannot be cannot.
    """

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
        self.solvers: list[Solver] = []
        self.plain: Solver | None = None
        self.refused: ConvoyError | None = None

    def on(self, mesh: Mesh) -> list[Found]:
        """The best plans on a mesh, one for each set of sample axes for which there is one."""
        shared = Shared(Prices(self._graph, mesh, self._costs))
        solved: dict[Axes, Found] = {}
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
                solved[axes] = Found(solver, mesh, solution, solution)
                self._known = min(self._known, solved[axes].solution.seconds)
            except UninterestingError:
                pass
            except ConvoyError as error:
                self.refused = error
            groups = solver.groups  # what was too wide before will be so again
        return [one for one in (self._whole(axes, solved) for axes in solved) if one is not None]

    def _whole(self, axes: Axes, solved: dict[Axes, Found]) -> Found | None:
        """What was solved for some axes, with all of them in use; None where fewer axes do better."""
        one, ops = solved[axes], self._layers.ops
        if used_axes(one.solution.layers, ops) == axes:
            return one
        # a plan that leaves an axis unused is one of fewer sample axes, and at least as cheap there
        enough = min((other.solution.seconds for a, other in solved.items() if set(a) < set(axes)), default=0.0)
        better = using_all_axes(one.solver, one.solution, ops, enough * (1 + self._tolerance))
        return Found(one.solver, one.mesh, better, one.free) if better is not None else None

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
