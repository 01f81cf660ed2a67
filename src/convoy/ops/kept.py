"""What autograd keeps of each call until the backward pass."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from convoy.ops.registry import OPERATIONS
from convoy.plans.layout import Layout
from convoy.plans.place import PlacedCall, Placement
from convoy.plans.traffic import needs_gradient


@dataclass(frozen=True)
class Kept:
    """A tensor that stays until the backward pass."""

    value: str  # its name, or that of one of the same shape where it is `inside` a kernel, such as a mask
    layout: Layout
    itemsize: int  # bytes of each element
    inside: bool = False
    padded: str = ""  # the convolution that keeps it with padding, on ranks where it pads the two ends unlike


class KeptTensors:
    """The tensors of a placement that stay until the backward pass, parameters and buffers not among them.

    `producers` has the number of the call for tensors that a call gives in this layout; all others come from other
    ranks, are the network's inputs, or are made inside of the call that keeps them. `held` stay whether a call keeps
    them or not: all that cross a cut between stages.
    """

    def __init__(self, placement: Placement) -> None:
        self._values = placement.graph.values
        self._roots: dict[tuple[str, Layout], str] = {}
        self.calls: list[set[Kept]] = []  # the tensors that each call keeps
        self.producers: dict[Kept, int] = {}
        differentiable = needs_gradient(placement.graph)
        for number, placed in enumerate(placement.calls):
            tensors: set[Kept] = set()
            if OPERATIONS[placed.call.op].is_view:
                self._look_through(placed)
            for tensor in (self.tensor(name, layout) for name, layout in placed.placed.outputs.items()):
                if self._values[tensor.value].origin == "call":
                    self.producers.setdefault(tensor, number)
            for kept in kept_by(placed, placement) if differentiable.intersection(placed.call.outputs) else ():
                value = self._values[kept.value]  # of a parameter the copy is kept in which autocast computes
                is_cast = value.origin == "parameter" and kept.itemsize < value.dtype.itemsize
                if value.origin in ("call", "input") or is_cast:
                    tensors.add(replace(kept, value=self._roots.get((kept.value, kept.layout), kept.value)))
            self.calls.append(tensors)
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
    """The tensors that autograd keeps of one call that has a gradient, parameters and buffers among them."""
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
