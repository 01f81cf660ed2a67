"""The best plan that uses all the axes over which its samples may be divided, by branch and bound."""

import heapq
from collections.abc import Mapping, Sequence

from convoy.errors import ConvoyError
from convoy.search.solve import Solution, Solver
from convoy.search.space import Strategy, used_axes

_BRANCHES = 400


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
