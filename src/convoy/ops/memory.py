"""How much memory a plan takes on each rank: parameters, their gradients, and what the backward pass needs kept.

Counted from the layouts: what autograd keeps for each kind of call, tensors that several calls keep once, and which
inputs a call may overwrite as nobody else reads them. What a kernel holds while it runs, the optimizer's state and the
framework itself come on top.
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from convoy.graph.graph import Call, Graph, Ref
from convoy.ops.convolution import paddings_of
from convoy.ops.registry import OPERATIONS
from convoy.plans.layout import Layout
from convoy.plans.place import Memory, PlacedCall, Placement
from convoy.plans.stages import StagedGraph
from convoy.plans.traffic import needs_gradient

_ADDITIONS = ("add", "__add__", "__iadd__", "__radd__")


class Readers:
    """Who reads each value of a network.

    Args:
        graph: the network.
        outputs: names of the values that it returns.
    """

    def __init__(self, graph: Graph, outputs: Iterable[str]) -> None:
        self._graph = graph
        self._outputs = tuple(outputs)
        self._producers = {name: call for call in graph.calls for name in call.outputs}

    @cached_property
    def _numbers(self) -> dict[str, int]:
        found = {name: len(calls) for name, calls in self._graph.consumers().items()}
        for name in self._outputs:
            found[name] += 1
        return found

    def is_spare(self, name: str, transferred: Container[str]) -> bool:
        """Whether the only call that takes a value may overwrite it; `transferred` come to it from other ranks."""
        producer = self._producers.get(name)
        if producer is None or name in transferred or self._numbers[name] != 1:
            return False
        is_sum = producer.op == "elementwise" and getattr(producer.function, "__name__", "") in _ADDITIONS
        return OPERATIONS[producer.op].gives_own or is_sum


def overwritten(call: Call, is_spare: Callable[[str], bool]) -> str | None:
    """The input that a call writes its result over, or None where it takes memory of its own."""
    name = getattr(call.function, "__name__", "")
    if call.op != "elementwise" or not call.inputs or set(call.kwargs) - {"inplace"}:
        return None
    if name == "relu" and call.args == (Ref(call.inputs[0]),):
        return call.inputs[0] if is_spare(call.inputs[0]) else None
    terms = tuple(map(Ref, call.inputs))
    if name in _ADDITIONS and len(terms) == 2 and set(call.args) == set(terms) and not call.kwargs:
        return next((source for source in call.inputs if is_spare(source)), None)
    return None


@dataclass(frozen=True)
class Kept:
    """A tensor that stays until the backward pass.

    Attributes:
        value: the name of the tensor, or of one that has its shape where it is `inside` a kernel, such as a mask.
        layout: how it lies over the mesh.
        itemsize: bytes for each element.
        padded: the convolution that keeps it with padding, on ranks where it pads the two ends unlike.
    """

    value: str
    layout: Layout
    itemsize: int
    inside: bool = False
    padded: str = ""


def predict_memory(placement: Placement, held: Iterable[str] = ()) -> list[Memory]:
    """Memory of every rank in one forward and backward pass over the whole batch that was captured.

    Args:
        placement: the network on its mesh, or what some ranks run of it.
        held: values that stay whether the backward pass needs them or not.
    """
    kept = kept_for_backward(placement, held)
    return [_of_rank(placement, kept, rank) for rank in range(placement.mesh.num_devices)]


def memory_in_stages(placement: Placement, staged: StagedGraph) -> list[Memory]:
    """Memory of every rank where each runs its stage: all that crosses a cut stays as well, on both sides of it."""
    of_stages = []
    for stage in range(staged.number):
        crossing = {each.value for each in (*staged.received(stage), *staged.sent(stage))}
        of_stages.append(predict_memory(staged.part(placement, stage), crossing))
    mesh = placement.mesh
    return [of_stages[mesh.stage_of(rank)][rank] for rank in range(mesh.num_devices)]


def kept_for_backward(placement: Placement, held: Iterable[str] = ()) -> set[Kept]:
    """The tensors that stay until the backward pass, parameters and buffers not among them, and what is `held`."""
    graph = placement.graph
    differentiable = needs_gradient(graph)
    names: dict[tuple[str, Layout], str] = {}
    found: set[Kept] = set()
    for placed in placement.calls:
        if not differentiable.intersection(placed.call.outputs):
            continue
        for kept in kept_by(placed, placement):
            value = graph.values[kept.value]  # of a parameter the copy is kept in which autocast computes
            is_cast = value.origin == "parameter" and kept.itemsize < value.dtype.itemsize
            if value.origin in ("call", "input") or is_cast:
                found.add(replace(kept, value=names.get((kept.value, kept.layout), kept.value)))
        if OPERATIONS[placed.call.op].is_view:
            source, output = placed.call.inputs[0], placed.call.outputs[0]
            root = names.get((source, _where(placed.placed.inputs[source])), source)
            names[output, _where(placed.placed.outputs[output])] = root
    for name in held:
        layout = _where(placement.layouts[name])
        found.add(Kept(names.get((name, layout), name), layout, graph.values[name].dtype.itemsize))
    return found


def kept_by(placed: PlacedCall, placement: Placement) -> Iterator[Kept]:
    """What autograd keeps of one call that has a gradient, parameters and buffers among it."""
    call, values, operation = placed.call, placement.graph.values, OPERATIONS[placed.call.op]
    for name, itemsize in operation.keeps(call, values):
        layout = placed.placed.inputs.get(name) or placed.placed.outputs.get(name, Layout())
        padded = call.name if _pads(placed, name) else ""
        yield Kept(name, _where(layout), itemsize or values[name].dtype.itemsize, padded=padded)
    for name in call.outputs if operation.keeps_inside else ():
        itemsize = operation.keeps_inside * values[name].dtype.itemsize
        yield Kept(name, _where(placed.placed.outputs[name]), itemsize, inside=True)


def _pads(placed: PlacedCall, name: str) -> bool:
    call = placed.call
    if call.op != "conv" or call.attributes["transposed"] or name != call.attributes["input"]:
        return False
    return any(dim > 1 for dim, _ in placed.placed.outputs[call.outputs[0]].splits)


def _where(layout: Layout) -> Layout:
    """The layout without what it says of the gradient."""
    return replace(layout, copied=frozenset())


def _of_rank(placement: Placement, kept: set[Kept], rank: int) -> Memory:
    mesh, graph = placement.mesh, placement.graph
    place = mesh.coordinates(rank)
    of_origin = {"parameter": 0, "buffer": 0}
    for value in graph.values.values():
        if value.origin in of_origin and value.name in placement.layouts:
            layout = placement.layouts[value.name]
            of_origin[value.origin] += math.prod(layout.local_shape(value.shape, mesh, place)) * value.dtype.itemsize
    calls = {placed.call.name: placed for placed in placement.calls}
    sizes = {}
    for tensor in kept:
        whole = graph.shape(tensor.value)
        parts = tuple(tensor.layout.parts(dim, mesh, place, size) for dim, size in enumerate(whole))
        shape, padding = [len(part) for part in parts], [0] * len(parts)
        if tensor.padded:
            call = calls[tensor.padded]
            output = call.placed.outputs[call.call.outputs[0]]
            paddings = paddings_of(graph, call.call, output, mesh, place)
            padding[2:] = [before + after for _, before, after in paddings]
        # what is the same on this rank is there once, whatever the layouts of other ranks
        of_call = tensor.padded if any(padding) else ""
        size = math.prod(map(sum, zip(shape, padding, strict=True))) * tensor.itemsize
        sizes[tensor.value, parts, tensor.itemsize, tensor.inside, of_call] = size
    activations = sum(sizes.values())
    gradients = of_origin["parameter"] if graph.training else 0
    return Memory(of_origin["parameter"], gradients, of_origin["buffer"], activations)
