"""What autograd keeps of each call until the backward pass."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from convoy.ops.registry import OPERATIONS
from convoy.plans.layout import Layout
from convoy.plans.place import PlacedCall, Placement
from convoy.plans.traffic import needs_gradient


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


class KeptTensors:
    """The tensors of a placement that stay until the backward pass, parameters and buffers not among them.

    Attributes:
        calls: those that each call keeps, in order.
        held: those that stay whether a call keeps them or not: all that crosses a cut between stages.
        producers: for those that a call gives, as it gives them, its number; all others come from other ranks, are the
            network's inputs, or are made inside of the call that keeps them.
    """

    def __init__(self, placement: Placement) -> None:
        self._values = placement.graph.values
        self._roots: dict[tuple[str, Layout], str] = {}
        self.calls: list[set[Kept]] = []
        self.producers: dict[Kept, int] = {}
        differentiable = needs_gradient(placement.graph)
        for number, placed in enumerate(placement.calls):
            found: set[Kept] = set()
            if OPERATIONS[placed.call.op].is_view:
                self._look_through(placed)
            for tensor in (self.tensor(name, layout) for name, layout in placed.placed.outputs.items()):
                if self._values[tensor.value].origin == "call":
                    self.producers.setdefault(tensor, number)
            for kept in kept_by(placed, placement) if differentiable.intersection(placed.call.outputs) else ():
                value = self._values[kept.value]  # of a parameter the copy is kept in which autocast computes
                is_cast = value.origin == "parameter" and kept.itemsize < value.dtype.itemsize
                if value.origin in ("call", "input") or is_cast:
                    found.add(replace(kept, value=self._roots.get((kept.value, kept.layout), kept.value)))
            self.calls.append(found)
        self.held = {self.tensor(name, placement.layouts[name]) for name in placement.held}

    def tensor(self, name: str, layout: Layout) -> Kept:
        """A value in a layout, as it is kept."""
        where = _where(layout)
        return Kept(self._roots.get((name, where), name), where, self._values[name].dtype.itemsize)

    def _look_through(self, placed: PlacedCall) -> None:
        source, output = placed.call.inputs[0], placed.call.outputs[0]
        root = self._roots.get((source, _where(placed.placed.inputs[source])), source)
        self._roots[output, _where(placed.placed.outputs[output])] = root


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
    return replace(layout, copied=frozenset()) if layout.copied else layout
