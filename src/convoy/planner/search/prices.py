"""What there is to choose among, and what it costs: every kind of call is placed and priced once.

Layouts have numbers here, and equal questions one answer; blocks that repeat are alike but for their names.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Graph, Value
from convoy.ops import OPERATIONS
from convoy.ops.recompute import kept_by
from convoy.planner.cost.additive import Additive, OfParameter
from convoy.plans.layout import Layout
from convoy.plans.mesh import Axes, Mesh
from convoy.plans.place import COMPUTE, Batch, PlacedCall, Placement, Situation
from convoy.plans.transfer import transfer

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
    return [subset for count in range(len(axes), -1, -1) for subset in itertools.combinations(axes, count)]


def strategies(mesh: Mesh, axes: Axes, among: Sequence[str] = AXIS_STRATEGIES) -> list[Strategy]:
    """All combinations of strategies `among` some, on a mesh whose samples are divided over `axes` at most."""
    choices = [
        [strategy for strategy in AXIS_STRATEGIES if strategy in among and (strategy != "sample" or axis in axes)]
        for axis in mesh.axes
    ]
    return list(itertools.product(*choices))


def structure(call: Call, graph: Graph) -> tuple[object, ...]:
    """What two calls must have in common to be placed alike and to cost the same. Names of tensors stand in it as
    places among the call's inputs and outputs."""
    values = graph.values
    places = {name: f"${number}" for number, name in enumerate((*call.inputs, *call.outputs))}
    tensors = tuple(
        ((value := values[name]).shape, str(value.dtype), value.origin, name in graph.differentiable) for name in places
    )

    def anonymous(match: re.Match[str]) -> str:
        name = match[1]
        return places.get(name, f"${values[name].origin}" if name in values else match[0])

    text = re.sub("'([^']*)'", anonymous, repr((call.attributes, call.args, call.kwargs)))
    function = getattr(call.function, "__name__", repr(call.function))
    return call.op, call.recomputed, function, len(call.inputs), tensors, text


NOWHERE = -1  # stands for the layout of a value that cannot be


@dataclass(frozen=True)
class Answer:
    """How a call is placed."""

    wants: tuple[int, ...]  # number of each input's layout that it asks for; NOWHERE where it asks nothing
    gives: tuple[int, ...]  # number of each output's layout
    seconds: float  # of the call itself
    bytes: float  # on rank 0, that it keeps for the backward pass


T = TypeVar("T")


class Prices:
    """What is known of a graph, captured at its whole batch, on a mesh, for all ways to divide its samples. The costs
    are asked once for all that is alike."""

    def __init__(self, graph: Graph, mesh: Mesh, costs: Additive) -> None:
        self.graph = graph
        self.mesh = mesh
        self.costs = costs
        self.layouts: list[Layout] = []
        training = [call for call in graph.calls if graph.differentiable.intersection(call.outputs)]
        # how many calls keep each value for the backward pass
        self._keepers = Counter(
            name for call in training for name in {name for name, _ in OPERATIONS[call.op].keeps(call, graph.values)}
        )
        self._numbers: dict[Layout, int] = {}
        self._structures: dict[tuple[object, ...], int] = {}
        self._arrays: dict[tuple[object, bytes], int] = {}
        self._answers: dict[tuple[object, ...], Any] = {}

    def once(self, *question: object, ask: Callable[[], T]) -> T:
        """The answer to a question of its own kind, which is asked but once."""
        if question not in self._answers:
            self._answers[question] = ask()
        answer: T = self._answers[question]
        return answer

    def key(self, ids: NDArray[np.int64]) -> int:
        """The same number for equal arrays, so that what was worked out for one serves all of them."""
        return self._arrays.setdefault((ids.shape, ids.tobytes()), len(self._arrays))

    def number(self, layout: Layout) -> int:
        if layout not in self._numbers:
            self._numbers[layout] = len(self.layouts)
            self.layouts.append(layout)
        return self._numbers[layout]

    def kind(self, call: Call) -> int:
        """A number for all calls that are alike but for their names."""

        def number() -> int:
            keepers = tuple(self._keepers[name] for name in (*call.inputs, *call.outputs))
            key = (*structure(call, self.graph), self.costs.context(call), keepers)
            return self._structures.setdefault(key, len(self._structures))

        return self.once("kind", call.name, ask=number)

    def answer(self, call: Call, batch: Batch, strategy: Strategy, inputs: Sequence[int]) -> Answer | ConvoyError:
        """How a call is placed, or why it cannot be. The strategy is empty where the call's rule does not look at it;
        `inputs` has for every input the number of its layout, NOWHERE for parameters, buffers and constants."""
        relevant = self._relevant(call, batch, strategy, inputs)
        return self.once("answer", self.kind(call), relevant, ask=partial(self._ask, call, batch, strategy, inputs))

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

        def priced() -> tuple[float, float]:
            blank = Placement(self.graph, self.mesh, batch, (), {}, {}, {})
            placed_call = PlacedCall(call, strategy, placed, dict.fromkeys(moved, ()))
            return self.costs.compute(placed_call, blank), self._kept(placed_call, blank)

        places = tuple(map(call.inputs.index, moved))
        return Answer(wants, gives, *self.once("call", self.kind(call), wants, gives, places, ask=priced))

    def _kept(self, placed: PlacedCall, blank: Placement) -> float:
        """Bytes on rank 0 that a call keeps; of a value that several calls keep, its part. Where they keep it in
        several layouts that is too little: the bytes are to guide the search, and what a plan needs is counted anew."""
        held = 0.0
        for tensor in kept_by(placed, blank) if self.graph.differentiable.intersection(placed.call.outputs) else ():
            if self.graph.values[tensor.value].origin in ("call", "input"):
                held += tensor.bytes(blank) / (1 if tensor.is_extra(self.graph) else self._keepers[tensor.value])
        return held

    def transfer(self, source: int, target: int, value: Value) -> float:
        if source in (target, NOWHERE) or target == NOWHERE:
            return 0.0

        def seconds() -> float:
            steps = transfer(self.layouts[source], self.layouts[target], self.mesh, value.shape)
            return sum(self.costs.transfer(step, self.mesh, value) for step in steps)

        tensor = value.shape, value.dtype, value.name in self.graph.differentiable
        return self.once("transfer", source, target, tensor, ask=seconds)

    def parameter(self, value: Value, number: int) -> OfParameter:
        layout = self.layouts[number]
        ask = partial(self.costs.parameter, value, layout, self.mesh)
        return self.once("parameter", value.shape, value.dtype, value.trains, number, ask=ask)


def is_choosing(call: Call) -> bool:
    """Whether a plan's strategy decides how a call is placed."""
    return call.op in CHOOSING
