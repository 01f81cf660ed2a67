"""How many bytes each rank sends for a plan: counted from the layouts, before anything runs.

A rank of a group of k sends for a tensor of n elements: in an all-reduce 2(k-1)/k·n (ring: Patarasuk and Yuan, 2009),
in a gather its own part to k-1 others, in an exchange or reduce-scatter exactly what the others ask of it. What is sent
inside a layer (the statistics of a batch norm over several ranks) is not counted.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from convoy.graph.graph import Graph
from convoy.plans.layout import WHOLE, Layout
from convoy.plans.mesh import Coordinates, Mesh
from convoy.plans.place import Placement
from convoy.plans.stages import Crossing, StagedGraph
from convoy.plans.transfer import Step


@dataclass(frozen=True)
class Traffic:
    """Numbers that one rank sends in the forward and in the backward pass: elements or bytes."""

    forward: int = 0
    backward: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: int) -> "Traffic":
        return Traffic(self.forward * factor, self.backward * factor)


@dataclass(frozen=True)
class Sent:
    """The messages of one step."""

    call: str  # that asks for it; empty where the network's own output does
    value: str  # name of the tensor
    step: Step
    ranks: tuple[Traffic, ...]  # bytes that each rank sends


@dataclass(frozen=True)
class Crossed:
    """The messages of stages for one value."""

    crossing: Crossing
    ranks: tuple[Traffic, ...]  # bytes that each rank sends: of the value forward, of its gradient backward


def all_reduce_elements(num_elements: int, count: int) -> int:
    """Elements that a rank sends in an all-reduce over `count` ranks."""
    return -(-2 * (count - 1) * num_elements // count)


@functools.lru_cache(maxsize=4096)
def step_elements(step: Step, mesh: Mesh, coordinates: Coordinates, shape: tuple[int, ...]) -> Traffic:
    """Elements that the rank at `coordinates` sends for one step of a tensor of the whole `shape`."""
    count = mesh.size(step.axes)
    before = math.prod(step.source.local_shape(shape, mesh, coordinates))
    after = math.prod(step.target.local_shape(shape, mesh, coordinates))
    if step.kind == "reduce":
        return Traffic(all_reduce_elements(before, count), 0)
    if step.kind == "copy":
        return Traffic(0, all_reduce_elements(before, count))
    if step.kind == "slice":
        axes = tuple(axis for axis in step.axes if axis not in step.source.copied)
        return Traffic(0, (mesh.size(axes) - 1) * after)
    if step.kind == "gather":
        return Traffic((count - 1) * before, 0)
    if step.kind == "keep":
        return Traffic()
    peers = [place for place in mesh.group(coordinates, step.axes) if place != coordinates]
    if step.kind == "reduce_scatter":
        parts_of_peers = (math.prod(step.target.local_shape(shape, mesh, peer)) for peer in peers)
        return Traffic(sum(parts_of_peers), (count - 1) * after)
    from_peers = _received(step, mesh, coordinates, shape)
    return Traffic(
        sum(_received(step, mesh, peer, shape)[coordinates] for peer in peers), sum(from_peers[peer] for peer in peers)
    )


@functools.lru_cache(maxsize=4096)
def _received(step: Step, mesh: Mesh, receiver: Coordinates, shape: tuple[int, ...]) -> dict[Coordinates, int]:
    """Elements that a rank gets from each rank of its group: its own, and the rest from the first that has them."""
    members = mesh.group(receiver, step.axes)
    elements = dict.fromkeys(members, 1)
    for dim, size in enumerate(shape):
        split = step.source.split(dim)
        places = {place: mesh.index(place, split.axes) if split else 0 for place in members}
        indices_left = set(step.target.parts(dim, mesh, receiver, size))
        numbers: dict[int, int] = {}
        for place in sorted(members, key=lambda place: (places[place] != places[receiver], places[place])):
            if places[place] not in numbers:
                part = indices_left.intersection(step.source.parts(dim, mesh, place, size))
                numbers[places[place]] = len(part)
                indices_left -= part
        for place in members:
            elements[place] *= numbers[places[place]]
    return elements


def redistributions(placement: Placement) -> Iterator[tuple[int, str, tuple[Step, ...]]]:
    """The steps that bring values to layouts in which they do not lie, each once for all calls that want a value so:
    number of the first of these calls (for the network's own outputs, how many calls there are), value and steps."""
    targets: set[tuple[str, Layout]] = set()
    for number, transfers in enumerate((*(placed.transfers for placed in placement.calls), placement.outputs)):
        for name, steps in transfers.items():
            if steps and (name, steps[-1].target) not in targets:
                targets.add((name, steps[-1].target))
                yield number, name, steps


def transfer_traffic(placement: Placement) -> list[Sent]:
    """The messages between calls."""
    graph, mesh = placement.graph, placement.mesh
    differentiable, places = needs_gradient(graph), [mesh.coordinates(rank) for rank in range(mesh.num_devices)]
    elements_of: dict[tuple[Step, tuple[int, ...]], list[Traffic]] = {}  # blocks repeat
    calls, messages = [*(placed.call.name for placed in placement.calls), ""], []
    for number, name, steps in redistributions(placement):
        value = graph.values[name]
        for step in steps:
            key = step, value.shape
            if key not in elements_of:
                elements_of[key] = [step_elements(step, mesh, place, value.shape) for place in places]
            traffics = (elements * value.dtype.itemsize for elements in elements_of[key])
            ranks = tuple(sent if name in differentiable else Traffic(sent.forward) for sent in traffics)
            messages.append(Sent(calls[number], name, step, ranks))
    return messages


def cut_traffic(placement: Placement, staged: StagedGraph) -> list[Crossed]:
    """The messages between stages: ranks at one place on the other axes send their part of each value at a cut."""
    mesh, differentiable, messages = placement.mesh, needs_gradient(placement.graph), []
    for crossing in staged.crossings:
        ranks = []
        for rank in range(mesh.num_devices):
            size = placement.local_bytes(crossing.value, rank)
            backward = size if mesh.stage_of(rank) == crossing.target and crossing.value in differentiable else 0
            ranks.append(Traffic(size if mesh.stage_of(rank) == crossing.source else 0, backward))
        messages.append(Crossed(crossing, tuple(ranks)))
    return messages


def gradient_traffic(placement: Placement) -> dict[str, tuple[int, ...]]:
    """For every parameter whose gradient is added over some axes, the bytes that each rank sends for it."""
    graph, mesh, traffic = placement.graph, placement.mesh, dict[str, tuple[int, ...]]()
    for value in graph.parameters() if graph.training else ():
        if axes := placement.layouts.get(value.name, WHOLE).copied:
            count, width = mesh.size(tuple(axes)), value.dtype.itemsize
            sizes = (placement.local_bytes(value.name, rank) for rank in range(mesh.num_devices))
            traffic[value.name] = tuple(width * all_reduce_elements(size // width, count) for size in sizes)
    return traffic


def needs_gradient(graph: Graph) -> frozenset[str]:
    """Names of the parameters and of all values that depend on one, in training."""
    if not graph.training:
        return frozenset()
    names = {value.name for value in graph.parameters() if value.dtype.is_floating_point}
    for call in graph.calls:
        if names.intersection(call.inputs) and getattr(call.function, "__name__", "") != "detach":
            names |= {name for name in call.outputs if graph.values[name].dtype.is_floating_point}
    return frozenset(names)
