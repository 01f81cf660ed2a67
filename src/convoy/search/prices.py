"""Places and prices calls, each kind of call once: layouts have numbers here, and equal questions one answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Graph, Value
from convoy.plans.layout import Layout, Split
from convoy.plans.memory import kept_by
from convoy.plans.mesh import Mesh
from convoy.plans.place import PlacedCall, Placement
from convoy.plans.rules import RULES, Batch, Situation
from convoy.plans.rules.whole import rule as whole
from convoy.plans.traffic import needs_gradient
from convoy.plans.transfer import transfer
from convoy.search.costs import Costs
from convoy.search.space import CHOOSING, Strategy
from convoy.search.structure import Structure, structure

NOWHERE = -1
"""Stands for the layout of a value that cannot be."""


@dataclass(frozen=True)
class Answer:
    """How a call is placed.

    Attributes:
        wants: number of the layout that it asks for, for each of its inputs; NOWHERE where it asks nothing.
        gives: number of the layout of each of its outputs.
        seconds: of the call itself.
        inside: bytes that it alone keeps for the backward pass, on rank 0.
        keeps: places of the inputs, and after them the outputs, that it keeps for the backward pass.
    """

    wants: tuple[int, ...]
    gives: tuple[int, ...]
    seconds: float
    inside: float
    keeps: tuple[int, ...]


class Prices:
    """What is known of a graph on a mesh, for all ways to divide its samples.

    Args:
        graph: the network, captured at its whole batch.
        mesh: the devices.
        costs: asked once for all that is alike.
    """

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
        """The number of a layout."""
        found = self._numbers.get(layout)
        if found is None:
            # equal splits are one object, which is quick to compare
            splits = tuple((dim, self._splits.setdefault(split, split)) for dim, split in layout.splits)
            layout = Layout(splits, layout.partial, layout.copied)
            found = self._numbers[layout] = len(self.layouts)
            self.layouts.append(layout)
        return found

    def kind(self, call: Call) -> int:
        """A number for all calls that are alike but for their names."""
        found = self._of_call.get(call.name)
        if found is None:
            key = (*structure(call, self.graph, self.differentiable), self.costs.context(call))
            found = self._of_call[call.name] = self._structures.setdefault(key, len(self._structures))
        return found

    def answer(self, call: Call, batch: Batch, strategy: Strategy, given: Sequence[int]) -> Answer | ConvoyError:
        """How a call is placed, or why it cannot be.

        Args:
            call: the call.
            batch: how the samples are divided.
            strategy: of its layer; empty where its rule does not look at it.
            given: for every input the number of its layout, NOWHERE for parameters, buffers and constants.
        """
        key = (self.kind(call), *self._relevant(call, batch, strategy, given))
        found = self._answers.get(key)
        if found is None:
            found = self._answers[key] = self._ask(call, batch, strategy, given)
        return found

    def _relevant(self, call: Call, batch: Batch, strategy: Strategy, given: Sequence[int]) -> tuple[object, ...]:
        """All that the rule looks at; convolutions look at no more than how their input's channels are divided."""
        if call.op not in CHOOSING:
            return tuple(given)
        axes = batch.axes if "sample" in strategy else ()
        if call.op != "conv":
            return (strategy, axes, *given)
        follows = "channel" in strategy or (call.attributes["groups"] > 1 and "filter" in strategy)
        at = given[call.inputs.index(call.attributes["input"])] if follows else NOWHERE
        return (strategy, axes, self.layouts[at].split(1) if at != NOWHERE else None)

    def _ask(self, call: Call, batch: Batch, strategy: Strategy, given: Sequence[int]) -> Answer | ConvoyError:
        layouts = {
            name: self.layouts[number] for name, number in zip(call.inputs, given, strict=True) if number != NOWHERE
        }
        situation = Situation(
            self.graph, self.mesh, batch, call, strategy or ("replicate",) * len(self.mesh.sizes), layouts
        )
        try:
            placed = RULES.get(call.op, whole)(situation)
        except ConvoyError as error:
            return error
        wants = tuple(self.number(placed.inputs[name]) if name in placed.inputs else NOWHERE for name in call.inputs)
        gives = tuple(self.number(placed.outputs[name]) for name in call.outputs)
        moved: tuple[str, ...] = ()
        if call.op not in CHOOSING:
            pairs = zip(call.inputs, given, wants, strict=True)
            moved = tuple(name for name, before, want in pairs if before not in (NOWHERE, want))
        key = (self.kind(call), wants, gives, tuple(map(call.inputs.index, moved)))
        found = self._computed.get(key)
        if found is None:
            blank = Placement(self.graph, self.mesh, batch, (), {}, {}, {})
            given_call = PlacedCall(call, strategy, placed, dict.fromkeys(moved, ()))
            seconds = self.costs.compute(given_call, blank)
            found = self._computed[key] = (seconds, *self._kept(given_call, blank))
        return Answer(wants, gives, *found)

    def _kept(self, placed: PlacedCall, blank: Placement) -> tuple[float, tuple[int, ...]]:
        """Bytes on rank 0 that only this call keeps, and which of its tensors it keeps."""
        call = placed.call
        if not self.differentiable.intersection(call.outputs):
            return 0.0, ()
        inside, keeps = 0.0, []
        names = (*call.inputs, *call.outputs)
        for kept in kept_by(placed, blank):
            if self.graph.values[kept.value].origin not in ("call", "input"):
                continue
            if kept.inside or kept.itemsize != self.graph.values[kept.value].dtype.itemsize:
                inside += self._numel(kept.layout, self.graph.shape(kept.value)) * kept.itemsize
            else:
                keeps.append(names.index(kept.value))
        return inside, tuple(keeps)

    def _numel(self, layout: Layout, shape: tuple[int, ...]) -> int:
        """Elements on rank 0."""
        number = 1
        for size in layout.local_shape(shape, self.mesh, (0,) * len(self.mesh.sizes)):
            number *= size
        return number

    def transfer(self, source: int, target: int, value: Value) -> float:
        """Seconds from one layout of a value to another."""
        if source in (target, NOWHERE) or target == NOWHERE:
            return 0.0
        differentiable = value.name in self.differentiable
        key = (source, target, value.shape, value.dtype.itemsize, differentiable)
        found = self._transfers.get(key)
        if found is None:
            steps = transfer(self.layouts[source], self.layouts[target], self.mesh, value.shape)
            found = self._transfers[key] = sum(
                self.costs.transfer(step, self.mesh, value.shape, value.dtype.itemsize, differentiable)
                for step in steps
            )
        return found

    def parameter(self, value: Value, number: int) -> tuple[float, float]:
        """Seconds for a parameter's gradient and update, and bytes for all that belongs to it on rank 0."""
        key = (value.shape, value.dtype, number)
        found = self._parameters.get(key)
        if found is None:
            layout = self.layouts[number]
            seconds = self.costs.gradient(value, layout, self.mesh) + self.costs.update(value, layout, self.mesh)
            found = self._parameters[key] = seconds, self.costs.parameter_memory(value, layout, self.mesh)
        return found

    def kept(self, number: int, value: Value) -> tuple[int, int]:
        """The number of a layout without what it says of the gradient, and the bytes of a value in it on rank 0."""
        key = (number, value.shape, value.dtype.itemsize)
        found = self._local.get(key)
        layout = self.layouts[number]
        if found is None:
            found = self._local[key] = self._numel(layout, value.shape) * value.dtype.itemsize
        return (self.number(replace(layout, copied=frozenset())) if layout.copied else number), found


def is_choosing(call: Call) -> bool:
    """Whether a plan's strategy decides how a call is placed."""
    return call.op in CHOOSING
