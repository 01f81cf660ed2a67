"""What the search needs to know of costs: seconds that add up over calls, transfers and parameters."""

from collections.abc import Hashable
from typing import Protocol

from convoy.graph.graph import Call, Value
from convoy.plans.layout import Layout
from convoy.plans.mesh import Mesh
from convoy.plans.place import PlacedCall, Placement
from convoy.plans.traffic import needs_gradient
from convoy.plans.transfer import Step


class Costs(Protocol):
    """Seconds of one pass forward and backward, and of the update that follows it, each for the busiest rank.

    Every answer must be a function of what is given: the search asks once for all calls, tensors and steps that are
    alike, and adds up what it is told.
    """

    def context(self, call: Call) -> Hashable:
        """What the seconds of a call depend on that is not in it: how its inputs are used elsewhere, and the like."""

    def compute(self, placed: PlacedCall, placement: Placement) -> float:
        """Seconds of a call, forward and backward.

        Args:
            placed: the call with the layouts of its inputs and outputs. Its `transfers` name the inputs that come from
                another layout, without the steps, and nothing for calls whose layer has a strategy.
            placement: of its graph, mesh and batch, which are all that is filled in.
        """

    def transfer(self, step: Step, mesh: Mesh, shape: tuple[int, ...], itemsize: int, differentiable: bool) -> float:
        """Seconds of one step of a redistribution, forward and backward.

        Args:
            step: the step.
            mesh: the devices.
            shape: of the whole tensor.
            itemsize: bytes of an element.
            differentiable: whether its gradient comes back.
        """

    def gradient(self, parameter: Value, layout: Layout, mesh: Mesh) -> float:
        """Seconds that the exchange of a parameter's gradient over its `copied` axes delays the step."""

    def update(self, parameter: Value, layout: Layout, mesh: Mesh) -> float:
        """Seconds of the optimiser for the part of a parameter that a rank holds."""

    def parameter_memory(self, parameter: Value, layout: Layout, mesh: Mesh) -> float:
        """Bytes on rank 0 for a parameter, its gradient and the optimiser's state."""

    def memory(self, placement: Placement) -> float:
        """Bytes on the rank that needs most, all included."""


def additive_seconds(placement: Placement, costs: Costs) -> float:
    """The sum that the search makes least, over a network as it is placed.

    A value travels once for all calls that want it in the same layout (`convoy.plans.traffic`).
    """
    graph, mesh = placement.graph, placement.mesh
    differentiable = needs_gradient(graph)
    total = sum(costs.compute(placed, placement) for placed in placement.calls)
    for (name, _), steps in redistributions(placement).items():
        value = graph.values[name]
        for step in steps:
            total += costs.transfer(step, mesh, value.shape, value.dtype.itemsize, name in differentiable)
    for value in graph.parameters():
        if value.name in placement.layouts:
            layout = placement.layouts[value.name]
            total += costs.gradient(value, layout, mesh) + costs.update(value, layout, mesh)
    return total


def redistributions(placement: Placement) -> dict[tuple[str, Layout], tuple[Step, ...]]:
    """The steps that bring values to layouts in which they are wanted and do not lie, by value and layout."""
    wanted = [(name, steps) for placed in placement.calls for name, steps in placed.transfers.items()]
    wanted += placement.outputs.items()
    return {(name, steps[-1].target): steps for name, steps in wanted if steps}
