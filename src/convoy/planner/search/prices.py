"""What there is to choose among, and what it costs: every kind of call is placed and priced once.

Layouts have numbers here, and equal questions one answer; blocks that repeat are alike but for their names.
"""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Graph, Ref, Value
from convoy.ops import OPERATIONS
from convoy.ops.recompute import kept_by
from convoy.plans.layout import Layout, Split
from convoy.plans.mesh import Axes, Mesh
from convoy.plans.place import COMPUTE, Batch, PlacedCall, Placement, Situation
from convoy.plans.traffic import needs_gradient
from convoy.plans.transfer import Step, transfer

# What a layer may have on one axis; of equal ones the first is kept
AXIS_STRATEGIES = ("sample", "replicate", "filter", "channel", "height", "width")

CHOOSING = (*COMPUTE, "random")  # kinds of calls whose rules look at the strategy of their layer

Strategy = tuple[str, ...]  # one strategy for each axis of a mesh


def meshes(num_devices: int) -> list[Mesh]:
    """All meshes of so many devices with one axis, `gpu`, or two, `node` and `gpu`, the last one between neighbours.
    One device is a mesh without axes."""
    if num_devices == 1:
        return [Mesh((), ())]
    pairs = [(nodes, num_devices // nodes) for nodes in range(2, num_devices // 2 + 1) if num_devices % nodes == 0]
    return [Mesh(("gpu",), (num_devices,)), *(Mesh(("node", "gpu"), pair) for pair in pairs)]


def sample_axes_of(mesh: Mesh) -> list[Axes]:
    """All sets of axes that may divide the samples, the largest first."""
    axes = tuple(mesh.axes)
    return [chosen for count in range(len(axes), -1, -1) for chosen in itertools.combinations(axes, count)]


def strategies(mesh: Mesh, axes: Axes, among: Sequence[str] = AXIS_STRATEGIES) -> list[Strategy]:
    """All combinations of strategies `among` some, on a mesh whose samples are divided over `axes` at most."""
    choices = [
        [strategy for strategy in AXIS_STRATEGIES if strategy in among and (strategy != "sample" or axis in axes)]
        for axis in mesh.axes
    ]
    return list(itertools.product(*choices))


def used_axes(layers: Mapping[str, Strategy], ops: Mapping[str, str]) -> Axes:
    """The axes on which some layer with weights is divided by samples; `ops` are the layers' kinds of work."""
    rows = [strategy for layer, strategy in layers.items() if ops[layer] != "random"]
    return tuple(axis for axis in range(len(rows[0]) if rows else 0) if any(s[axis] == "sample" for s in rows))


Structure = tuple[Any, ...]


def structure(call: Call, graph: Graph, differentiable: frozenset[str]) -> Structure:
    """What two calls must have in common to be placed alike and to cost the same. Names of tensors stand in it as
    places among the call's inputs and outputs; those in `differentiable` have a gradient."""
    places = {name: f"${number}" for number, name in enumerate((*call.inputs, *call.outputs))}
    tensors = tuple(
        ((value := graph.values[name]).shape, str(value.dtype), value.origin, name in differentiable) for name in places
    )
    return (
        call.op,
        call.recomputed,
        getattr(call.function, "__name__", repr(call.function)),
        len(call.inputs),
        tensors,
        _normal(call.attributes, places, graph),
        _normal(call.args, places, graph),
        _normal(call.kwargs, places, graph),
    )


def _normal(value: Any, places: Mapping[str, str], graph: Graph) -> Any:
    if isinstance(value, Ref):
        return places.get(value.name, "$")
    if isinstance(value, str):
        tensor = graph.values.get(value)
        return places.get(value, value if tensor is None else f"${tensor.origin}")
    if isinstance(value, Mapping):
        return tuple((str(key), _normal(item, places, graph)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_normal(item, places, graph) for item in value)
    if value is None or isinstance(value, bool | int | float):
        return value
    return repr(value)


class Costs(Protocol):
    """Seconds of one pass forward and backward, and of the update that follows it, each for the busiest rank. Every
    answer must be a function of what is given: the search asks once for all calls, tensors and steps that are alike,
    and adds up what it is told."""

    def context(self, call: Call) -> Hashable:
        """What the seconds of a call depend on that is not in it: how its inputs are used elsewhere, and the like."""

    def compute(self, placed: PlacedCall, placement: Placement) -> float:
        """Seconds of a call, forward and backward. Its `transfers` name the inputs that come from another layout,
        without the steps, and nothing for calls whose layer has a strategy. Of the placement, only graph, mesh and
        batch are filled in."""

    def transfer(self, step: Step, mesh: Mesh, shape: tuple[int, ...], itemsize: int, differentiable: bool) -> float:
        """Seconds of one step of a redistribution, forward and, where a gradient comes back, backward."""

    def laid_out(self, placed: PlacedCall, placement: Placement) -> float:
        """Seconds that a call takes less in each pass after the first, where its weight is laid out once for all."""

    def joining(self, placed: PlacedCall, placement: Placement, part: float) -> float:
        """Seconds of an update less where a weight's gradients of all passes are computed in one call, and not added
        up; they take `part` of the call's backward pass."""

    def gradient(self, parameter: Value, layout: Layout, mesh: Mesh) -> float:
        """Seconds that the exchange of a parameter's gradient over its `copied` axes delays the step."""

    def adding(self, parameter: Value, layout: Layout, mesh: Mesh) -> float:
        """Seconds that adding a parameter's gradient in one more pass to that of earlier ones takes."""

    def update(self, parameter: Value, layout: Layout, mesh: Mesh) -> float:
        """Seconds of the optimizer for the part of a parameter that a rank holds."""

    def parameter_memory(self, parameter: Value, layout: Layout, mesh: Mesh) -> float:
        """Bytes on rank 0 for a parameter, its gradient and the optimizer's state."""

    def workspace(self, placed: PlacedCall, placement: Placement) -> float:
        """Bytes that a call holds on rank 0 while it runs, beside what it is given and gives."""

    def memory(self, placement: Placement) -> float:
        """Bytes on the rank that needs most, all included."""


def additive_seconds(placement: Placement, costs: Costs) -> float:
    """The sum that the search makes least, over a network as it is placed. A value travels once for all calls that want
    it in the same layout (`convoy.plans.traffic`)."""
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
    asked = [(name, steps) for placed in placement.calls for name, steps in placed.transfers.items()]
    asked += placement.outputs.items()
    return {(name, steps[-1].target): steps for name, steps in asked if steps}


NOWHERE = -1  # stands for the layout of a value that cannot be


@dataclass(frozen=True)
class Answer:
    """How a call is placed."""

    wants: tuple[int, ...]  # number of each input's layout that it asks for; NOWHERE where it asks nothing
    gives: tuple[int, ...]  # number of each output's layout
    seconds: float  # of the call itself
    inside: float  # bytes that it alone keeps for the backward pass, on rank 0
    keeps: tuple[int, ...]  # places of the inputs, then the outputs, that it keeps for the backward pass


class Prices:
    """What is known of a graph, captured at its whole batch, on a mesh, for all ways to divide its samples. The costs
    are asked once for all that is alike."""

    def __init__(self, graph: Graph, mesh: Mesh, costs: Costs) -> None:
        self.graph = graph
        self.mesh = mesh
        self.costs = costs
        self.layouts: list[Layout] = []
        self.differentiable = needs_gradient(graph)
        self._numbers: dict[Layout, int] = {}
        self._splits: dict[Split, Split] = {}
        self._structures: dict[Structure, int] = {}
        self._of_call: dict[str, int] = {}
        self._answers: dict[tuple[object, ...], Answer | ConvoyError] = {}
        self._computed: dict[tuple[object, ...], tuple[float, float, tuple[int, ...]]] = {}
        self._transfers: dict[tuple[object, ...], float] = {}
        self._parameters: dict[tuple[object, ...], tuple[float, float]] = {}
        self._local: dict[tuple[object, ...], int] = {}

    def number(self, layout: Layout) -> int:
        number = self._numbers.get(layout)
        if number is None:
            # equal splits are one object, which is quick to compare
            splits = tuple((dim, self._splits.setdefault(split, split)) for dim, split in layout.splits)
            layout = Layout(splits, layout.partial, layout.copied)
            number = self._numbers[layout] = len(self.layouts)
            self.layouts.append(layout)
        return number

    def kind(self, call: Call) -> int:
        """A number for all calls that are alike but for their names."""
        number = self._of_call.get(call.name)
        if number is None:
            key = (*structure(call, self.graph, self.differentiable), self.costs.context(call))
            number = self._of_call[call.name] = self._structures.setdefault(key, len(self._structures))
        return number

    def answer(self, call: Call, batch: Batch, strategy: Strategy, inputs: Sequence[int]) -> Answer | ConvoyError:
        """How a call is placed, or why it cannot be. The strategy is empty where the call's rule does not look at it;
        `given` has for every input the number of its layout, NOWHERE for parameters, buffers and constants."""
        key = (self.kind(call), *self._relevant(call, batch, strategy, inputs))
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = self._ask(call, batch, strategy, inputs)
        return answer

    def _relevant(self, call: Call, batch: Batch, strategy: Strategy, inputs: Sequence[int]) -> tuple[object, ...]:
        """All that the rule looks at; convolutions look at no more than how their input's channels are divided."""
        if call.op not in CHOOSING:
            return tuple(inputs)
        axes = batch.axes if "sample" in strategy else ()
        if call.op != "conv":
            return (strategy, axes, *inputs)
        follows = "channel" in strategy or (call.attributes["groups"] > 1 and "filter" in strategy)
        at = inputs[call.inputs.index(call.attributes["input"])] if follows else NOWHERE
        return (strategy, axes, self.layouts[at].split(1) if at != NOWHERE else None)

    def _ask(self, call: Call, batch: Batch, strategy: Strategy, inputs: Sequence[int]) -> Answer | ConvoyError:
        layouts = {
            name: self.layouts[number] for name, number in zip(call.inputs, inputs, strict=True) if number != NOWHERE
        }
        situation = Situation(
            self.graph, self.mesh, batch, call, strategy or ("replicate",) * len(self.mesh.sizes), layouts
        )
        try:
            placed = OPERATIONS[call.op].place(situation)
        except ConvoyError as error:
            return error
        wants = tuple(self.number(placed.inputs[name]) if name in placed.inputs else NOWHERE for name in call.inputs)
        gives = tuple(self.number(placed.outputs[name]) for name in call.outputs)
        moved: tuple[str, ...] = ()
        if call.op not in CHOOSING:
            pairs = zip(call.inputs, inputs, wants, strict=True)
            moved = tuple(name for name, before, want in pairs if before not in (NOWHERE, want))
        key = (self.kind(call), wants, gives, tuple(map(call.inputs.index, moved)))
        computed = self._computed.get(key)
        if computed is None:
            blank = Placement(self.graph, self.mesh, batch, (), {}, {}, {})
            given_call = PlacedCall(call, strategy, placed, dict.fromkeys(moved, ()))
            seconds = self.costs.compute(given_call, blank)
            computed = self._computed[key] = (seconds, *self._kept(given_call, blank))
        return Answer(wants, gives, *computed)

    def _kept(self, placed: PlacedCall, blank: Placement) -> tuple[float, tuple[int, ...]]:
        """Bytes on rank 0 that only this call keeps, and which of its tensors it keeps."""
        call = placed.call
        if not self.differentiable.intersection(call.outputs):
            return 0.0, ()
        inside, keeps = 0.0, []
        names = (*call.inputs, *call.outputs)
        for tensor in kept_by(placed, blank):
            if self.graph.values[tensor.value].origin not in ("call", "input"):
                continue
            if tensor.inside or tensor.itemsize != self.graph.values[tensor.value].dtype.itemsize:
                inside += self._numel(tensor.layout, self.graph.shape(tensor.value)) * tensor.itemsize
            else:
                keeps.append(names.index(tensor.value))
        return inside, tuple(keeps)

    def _numel(self, layout: Layout, shape: tuple[int, ...]) -> int:
        return prod(layout.local_shape(shape, self.mesh, (0,) * len(self.mesh.sizes)))

    def transfer(self, source: int, target: int, value: Value) -> float:
        if source in (target, NOWHERE) or target == NOWHERE:
            return 0.0
        differentiable = value.name in self.differentiable
        key = (source, target, value.shape, value.dtype.itemsize, differentiable)
        seconds = self._transfers.get(key)
        if seconds is None:
            steps = transfer(self.layouts[source], self.layouts[target], self.mesh, value.shape)
            seconds = self._transfers[key] = sum(
                self.costs.transfer(step, self.mesh, value.shape, value.dtype.itemsize, differentiable)
                for step in steps
            )
        return seconds

    def parameter(self, value: Value, number: int) -> tuple[float, float]:
        """Seconds for a parameter's gradient and update, and bytes for all that belongs to it on rank 0."""
        key = (value.shape, value.dtype, number)
        cost = self._parameters.get(key)
        if cost is None:
            layout = self.layouts[number]
            seconds = self.costs.gradient(value, layout, self.mesh) + self.costs.update(value, layout, self.mesh)
            cost = self._parameters[key] = seconds, self.costs.parameter_memory(value, layout, self.mesh)
        return cost

    def kept(self, number: int, value: Value) -> tuple[int, int]:
        """The number of a layout without what it says of the gradient, and the bytes of a value in it on rank 0."""
        key = (number, value.shape, value.dtype.itemsize)
        num_bytes = self._local.get(key)
        layout = self.layouts[number]
        if num_bytes is None:
            num_bytes = self._local[key] = self._numel(layout, value.shape) * value.dtype.itemsize
        return (self.number(replace(layout, copied=frozenset())) if layout.copied else number), num_bytes


def floor(prices: Prices, batch: Batch, allowed: Mapping[str, Sequence[Strategy]]) -> float:
    """Seconds that every plan takes at least: those of its convolutions, each with the strategy that is cheapest."""
    total = 0.0
    for call in prices.graph.calls:
        if call.op == "conv":
            answers = (prices.answer(call, batch, one, [NOWHERE] * len(call.inputs)) for one in allowed[call.layer])
            total += min((one.seconds for one in answers if isinstance(one, Answer)), default=0.0)
    return total


def is_choosing(call: Call) -> bool:
    """Whether a plan's strategy decides how a call is placed."""
    return call.op in CHOOSING
