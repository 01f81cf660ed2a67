"""Plans that fit into memory: seconds and bytes are traded at a price that is raised until the plan fits.

Everett, "Generalized Lagrange multiplier method" (1963): the least sum of seconds and price × bytes is, among the
plans of at most as many bytes, the fastest; and for every price, that sum less price × limit is a bound for all plans
that fit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from convoy.errors import TooLargeError
from convoy.ops.recompute import kept_by, with_recomputed
from convoy.planner.cost.additive import Additive
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.pipeline import Staging
from convoy.planner.cost.prediction import most, rank_memory
from convoy.planner.search.prices import Strategy
from convoy.planner.search.solve import Solution
from convoy.plans.place import Placement
from convoy.units import size

_ROUNDS = 24
_ONLY_BYTES = 1e-12


@dataclass(frozen=True)
class Fitting:
    """The fastest plan found that fits, or the smallest where none does."""

    solution: Solution
    memory: float  # bytes on the rank that needs most
    fits: bool
    bound: float  # seconds that no plan that fits falls below, as far as bytes add up


def fitting(fastest: Solution, limit: float, memory: Callable[[Solution], float]) -> Fitting:
    """A plan for ranks with `limit` bytes. The solver counts bytes, `memory` those that a plan really needs on the rank
    that needs most; `fastest` is the best plan whatever it needs."""
    solver = fastest.solver
    needed = memory(fastest)
    if needed <= limit:
        return Fitting(fastest, needed, True, fastest.seconds)
    smallest = solver.solve(byte_price=1.0, time_price=_ONLY_BYTES)
    least = memory(smallest)
    if least > limit:
        return Fitting(smallest, least, False, fastest.seconds)
    best, of_best, bound = smallest, least, fastest.seconds
    memory_of = {_key(fastest): needed, _key(smallest): least}
    # what is counted on rank 0 and what the busiest rank needs differ: the price is for bytes as they are counted
    counted_limit = limit * fastest.bytes / needed
    low, high = 0.0, max(smallest.seconds - fastest.seconds, 1e-9) / max(fastest.bytes - smallest.bytes, 1.0) * 1e3
    for _ in range(_ROUNDS):
        price = (low * high) ** 0.5 if low else high / 8
        solution = solver.solve(byte_price=price)
        bound = max(bound, solution.seconds + price * (solution.bytes - counted_limit))
        if _key(solution) not in memory_of:
            memory_of[_key(solution)] = memory(solution)
        needed = memory_of[_key(solution)]
        if needed <= limit:
            high = price
            if solution.seconds < best.seconds:
                best, of_best = solution, needed
        else:
            low = price
        if low and high / low < 1.01:
            break
    return Fitting(best, of_best, True, min(bound, best.seconds))


def _key(solution: Solution) -> tuple[Strategy, ...]:
    return tuple(solution.layers.values())


def nothing_fits(
    placement: Placement,
    costs: Costs,
    needed: float,
    limit: float,
    what: str = "no plan fits: the smallest",
    staging: Staging | None = None,
) -> TooLargeError:
    """The error for where even the smallest plan is too large."""
    layers: dict[str, float] = {}
    outputs: dict[str, float] = {}  # several layers may keep the same one
    parameters = 0.0
    mesh, graph, sums = placement.mesh, placement.graph, Additive(costs, placement.graph)
    origin = (0,) * len(mesh.sizes)
    for placed in placement.calls:
        held = 0.0
        for name in placed.call.inputs:
            if graph.values[name].origin == "parameter":
                held += sums.parameter(graph.values[name], placement.layouts[name], mesh).held
        parameters += held
        for tensor in kept_by(placed, placement):
            if graph.values[tensor.value].origin in ("call", "input"):
                num_bytes = tensor.itemsize * prod(tensor.layout.local_shape(graph.shape(tensor.value), mesh, origin))
                outputs[tensor.value] = max(num_bytes, outputs.get(tensor.value, 0.0))
                held += num_bytes
        layers[placed.call.layer] = layers.get(placed.call.layer, 0.0) + held
    largest = max(layers, key=lambda layer: layers[layer])
    name = f"layer {largest}" if largest else "what the network itself computes"
    parts = ""
    if mesh.stage_axis is None:  # else a device has some of the layers
        of_calls, of_parameters = size(int(sum(outputs.values()))), size(int(parameters))
        parts = f" ({of_calls} for outputs of {len(outputs)} calls, {of_parameters} for parameters and gradients)"
    again = most(rank_memory(with_recomputed(placement, True), costs, staging)).total
    recompute = f"; with --recompute it needs {size(int(again))}" if again <= limit else ""
    more = "more devices" if mesh.stage_axis is None else "more stages on more devices"
    return TooLargeError(
        f"{what} needs {size(int(needed))} on a device{parts}, {size(int(needed - limit))} more than the "
        f"{size(int(limit))} there are; {name} takes most, {size(int(layers[largest]))}: use {more}, smaller "
        f"microbatches, smaller images, or a larger --memory-limit if the devices have more{recompute}",
        needed,
    )
