"""Plans that fit into memory: seconds and bytes are traded at a price that is raised until the plan fits.

Everett, "Generalized Lagrange multiplier method" (1963): the least sum of seconds and price × bytes is, among the
plans of at most as many bytes, the fastest; and for every price, that sum less price × limit is a bound for all plans
that fit.
"""

from collections import defaultdict
from dataclasses import dataclass
from math import prod

from convoy.errors import TooLargeError
from convoy.ops.recompute import kept_by, with_recomputed
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.local_op import local_bytes
from convoy.planner.cost.pipeline import Staging
from convoy.planner.cost.prediction import most, rank_memory
from convoy.planner.search.solve import Solution
from convoy.plans.place import Placement
from convoy.units import size

_ROUNDS = 24
_ONLY_BYTES = 1e-12


@dataclass(frozen=True)
class Fitting:
    """The fastest plan found that fits, or the smallest where none does."""

    solution: Solution
    bound: float  # seconds that no plan that fits falls below, as far as bytes add up


def fitting(fastest: Solution, limit: float) -> Fitting:
    """A plan for ranks with `limit` bytes; `fastest` is the best plan whatever it needs."""
    if fastest.memory <= limit:
        return Fitting(fastest, fastest.seconds)
    solver, bound = fastest.solver, fastest.seconds
    best = smallest = solver.solve(byte_price=1.0, time_price=_ONLY_BYTES)
    if smallest.memory > limit:
        return Fitting(smallest, bound)
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
    return Fitting(best, min(bound, best.seconds))


def nothing_fits(
    placement: Placement,
    costs: Costs,
    needed: float,
    limit: float,
    what: str = "no plan fits: the smallest",
    staging: Staging | None = None,
) -> TooLargeError:
    """The error for where even the smallest plan is too large."""
    layers = defaultdict[str, float](float)
    outputs: dict[str, int] = {}  # several layers may keep the same one
    mesh, values, parameters = placement.mesh, placement.graph.values, 0.0
    origin = (0,) * len(mesh.sizes)
    for placed in placement.calls:
        weights = [name for name in placed.call.inputs if values[name].origin == "parameter"]
        held = (2 + costs.update.state) * sum(local_bytes(placement, name, 0) for name in weights)
        parameters += held
        layers[placed.call.layer] += held
        for tensor in kept_by(placed, placement):
            if values[tensor.value].origin in ("call", "input"):
                num_bytes = tensor.itemsize * prod(tensor.layout.local_shape(values[tensor.value].shape, mesh, origin))
                outputs[tensor.value] = max(num_bytes, outputs.get(tensor.value, 0))
                layers[placed.call.layer] += num_bytes
    largest = max(layers, key=lambda layer: layers[layer])
    name = f"layer {largest}" if largest else "what the network itself computes"
    parts = ""
    if mesh.stage_axis is None:  # else a device has some of the layers
        of_calls, of_parameters = size(sum(outputs.values())), size(int(parameters))
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
