"""Puts a network's calls on the mesh as a plan says: the layout of every tensor, and what is sent between calls."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from convoy.graph.graph import Call, Graph
from convoy.plans.layout import WHOLE, Layout
from convoy.plans.mesh import Mesh
from convoy.plans.rules import RULES, Batch, Placed, Situation
from convoy.plans.rules.layouts import without_partial
from convoy.plans.rules.whole import rule as whole
from convoy.plans.transfer import Step, transfer

COMPUTE = ("conv", "linear")
"""Kinds of calls that a plan divides; all others follow."""


class Strategies(Protocol):
    """What placing needs of a plan."""

    @property
    def mesh(self) -> Mesh:
        """The devices."""

    def strategy(self, layer: str, op: str) -> tuple[str, ...]:
        """The strategy of a layer on each mesh axis."""


@dataclass(frozen=True)
class PlacedCall:
    """A call, how it is divided, and how its inputs get there.

    Attributes:
        strategy: of its layer, one for each mesh axis.
        transfers: for every input that is not where the call wants it, the steps from where it is.
    """

    call: Call
    strategy: tuple[str, ...]
    placed: Placed
    transfers: dict[str, tuple[Step, ...]]


@dataclass(frozen=True)
class Placement:
    """A network on a mesh: the layout of every tensor, and the communication between calls.

    >>> from torch import nn
    >>> graph = capture(nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 10)), [(4, 3, 2, 2)])
    >>> plan = Plan.parse({"mesh": {"gpu": 2}, "layers": {"1": {"gpu": "filter"}, "3": {"gpu": "channel"}}})
    >>> placement = place(graph, plan, Batch(plan.mesh, (), (range(4),)), [graph.output.name])
    >>> for call in placement.calls:  # a filter layer before a channel layer: one sum, at the end
    ...     print(call.call.layer, call.strategy, placement.layouts[call.call.outputs[0]].describe(plan.mesh))
    0 ('replicate',) whole
    1 ('filter',) dim 1 over gpu
    2 ('replicate',) dim 1 over gpu
    3 ('channel',) partial over gpu
    >>> [step.kind for step in placement.outputs[graph.output.name]]
    ['reduce']

    Attributes:
        layouts: where every value is kept; a parameter's `copied` axes are those over which its gradient is added.
        outputs: for each of the network's outputs, the steps to the samples of its rank.
    """

    graph: Graph
    mesh: Mesh
    batch: Batch
    calls: tuple[PlacedCall, ...]
    layouts: dict[str, Layout]
    outputs: dict[str, tuple[Step, ...]]
    output_layouts: dict[str, Layout]


def sample_axes(layers: Iterable[tuple[str, str]], plan: Strategies) -> tuple[int, ...]:
    """The axes on which some layer is divided by samples: each rank is given the samples of its place on them.

    Args:
        layers: name and op of every layer.
        plan: their strategies.
    """
    strategies = [plan.strategy(layer, op) for layer, op in layers if op in COMPUTE]
    return tuple(axis for axis in plan.mesh.axes if any(strategy[axis] == "sample" for strategy in strategies))


def place(
    graph: Graph,
    plan: Strategies,
    batch: Batch,
    outputs: Iterable[str],
    kept: Callable[[str], Layout | None] = lambda name: None,
    as_given: bool = False,
    whole_batch: bool = False,
) -> Placement:
    """Apply the rules to one call after the other.

    Args:
        graph: the network at its whole batch.
        plan: strategies of the layers.
        batch: how the samples are divided.
        outputs: names of the values that the network returns.
        kept: where a parameter or buffer is kept already; None puts it where its first call wants it.
        as_given: leave the outputs where the last calls give them, rather than with the ranks' own samples.
        whole_batch: every rank gives, and gets, all samples, as where the calls are part of what all ranks do alike.

    Raises:
        ConvoyError: a layer cannot be divided as the plan says.
    """
    mesh = plan.mesh
    samples = batch.split(batch.axes)
    of_batch = Layout.of({0: samples}) if samples else WHOLE
    layouts: dict[str, Layout] = {}
    for name in graph.inputs:
        shape = graph.shape(name)
        layouts[name] = of_batch if shape and shape[0] == batch.num_samples and not whole_batch else WHOLE
    calls = []
    for call in graph.calls:
        strategy = plan.strategy(call.layer, call.op)
        given = {name: layouts[name] for name in call.inputs if graph.values[name].origin in ("call", "input")}
        placed = RULES.get(call.op, whole)(Situation(graph, mesh, batch, call, strategy, given))
        steps = {}
        for name, wanted in placed.inputs.items():
            if name not in layouts:
                before = kept(name)
                layouts[name] = wanted if before is None else before
            if layouts[name] != wanted:
                steps[name] = transfer(layouts[name], wanted, mesh, graph.shape(name))
        layouts |= placed.outputs
        calls.append(PlacedCall(call, strategy, placed, steps))
    names = list(outputs)
    for name in names:
        layouts.setdefault(name, kept(name) or WHOLE)
    if as_given:
        targets = {name: without_partial(layouts[name]) for name in names}
    else:
        targets = {name: WHOLE if whole_batch else own_samples(graph.shape(name), batch) for name in names}
    last = {name: transfer(layouts[name], target, mesh, graph.shape(name)) for name, target in targets.items()}
    return Placement(graph, mesh, batch, tuple(calls), layouts, last, targets)


def own_samples(shape: tuple[int, ...], batch: Batch) -> Layout:
    """How a network's output lies: with the ranks' own samples. What belongs to no sample every rank has, but the
    gradient that it gives is only its share of it.
    """
    samples = batch.split(batch.axes)
    if samples is None:
        return WHOLE
    return Layout.of({0: samples}) if shape and shape[0] == batch.num_samples else Layout.of(copied=batch.axes)
