"""What autograd keeps of each call until the backward pass, and activations that are computed again there.

Chen et al., "Training deep nets with sublinear memory cost" (2016). The calls that are recomputed are cut into
stretches. Of a stretch only its inputs stay, and the backward pass begins by running it again. A redistribution always
ends a stretch, so that what came from other ranks is among the inputs and is not sent again: ranks would have to agree
on the order of such messages while gradients travel. What is exchanged inside a layer is kept (`context.py`, `Rerun`).

Where to cut is decided by the bytes of one pass: of all cuts, those are chosen whose peak is least, that is the largest
sum, over the stretches, of all inputs up to there and of what is inside the one that runs again. For equal layers these
are the √n stretches of the paper; but the bytes of ConvNets are in their first layers. They are found by bisection over
the peak, with a dynamic program that keeps least under it: 10 ms for ResNet-18, 30 ms for GoogLeNet.
"""

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from convoy.errors import ConvoyError
from convoy.graph.graph import Graph
from convoy.ops.registry import OPERATIONS
from convoy.plans.fit import nearest
from convoy.plans.layout import Layout
from convoy.plans.place import PlacedCall, Placement


@dataclass(frozen=True)
class Kept:
    """A tensor that stays until the backward pass."""

    value: str  # its name, or that of one of the same shape where it is `inside` a kernel, such as a mask
    layout: Layout
    itemsize: int  # bytes of each element
    inside: bool = False
    # the convolution or pooling that keeps it with padding, on ranks where a kernel does not pad by itself
    padded: str = ""

    def bytes(self, placement: Placement) -> int:
        """On the first rank, without padding."""
        mesh, shape = placement.mesh, placement.graph.shape(self.value)
        return self.layout.numel(shape, mesh, mesh.coordinates(0)) * self.itemsize

    def is_extra(self, graph: Graph) -> bool:
        """Whether the call that keeps it has made it, as a mask or a copy in another type."""
        return self.inside or self.itemsize != graph.values[self.value].dtype.itemsize


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
        differentiable = placement.graph.differentiable
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
    masks_elements = operation.keeps_inside and not call.attributes.get("channels")  # one number masks a whole channel
    for name in call.outputs if masks_elements else ():
        itemsize = operation.keeps_inside * values[name].dtype.itemsize
        yield Kept(name, _where(placed.placed.outputs[name]), itemsize, inside=True)


def _pads(placed: PlacedCall, name: str) -> bool:
    call = placed.call
    pads = call.op in ("conv", "max_pool", "avg_pool") and not call.attributes.get("transposed")
    if not pads or name != call.attributes["input"]:
        return False
    return any(dim > 1 for dim, _ in placed.placed.outputs[call.outputs[0]].splits)


def _where(layout: Layout) -> Layout:
    """The layout without what it says of the gradient."""
    return replace(layout, copied=frozenset()) if layout.copied else layout


# which layers are recomputed beside those for which the network itself asks: none, all, or patterns of their names
Recompute = bool | tuple[str, ...]

_ROUNDS = 16


def as_recompute(setting: bool | Sequence[str]) -> Recompute:
    """A user's setting as a `Recompute`; a ConvoyError where it is neither true nor false nor a list of texts."""
    if isinstance(setting, bool):
        return setting
    if (
        isinstance(setting, str)
        or not isinstance(setting, Sequence)
        or not all(isinstance(pattern, str) for pattern in setting)
    ):
        raise ConvoyError(
            f"recompute={setting!r} is unknown: it must be True, False, or a list of patterns, such as ['layer1.*']"
        )
    return tuple(setting)


def check_recompute(recompute: Recompute, layers: Iterable[str]) -> None:
    """Refuse patterns that match none of a network's layers, by a ConvoyError that names the nearest that would
    match."""
    names = list(dict.fromkeys(layers))
    for pattern in () if isinstance(recompute, bool) else recompute:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            hint = nearest(pattern, names) or "* matches all of them"
            raise ConvoyError(f"recompute: the pattern {pattern} matches no layer of this network: {hint}")


def recomputing(graph: Graph, recompute: Recompute) -> Graph:
    """The graph with the calls of these layers marked, beside those that already are."""
    if recompute is False:
        return graph
    patterns = ("*",) if recompute is True else recompute
    matches = {
        layer: any(fnmatch.fnmatchcase(layer, pattern) for pattern in patterns)
        for layer in {call.layer for call in graph.calls}
    }
    calls = (replace(call, recomputed=call.recomputed or matches[call.layer]) for call in graph.calls)
    return replace(graph, calls=tuple(calls))


def with_recomputed(placement: Placement, recomputed: bool) -> Placement:
    """The same placement with all of its calls recomputed, or none."""
    calls = tuple(replace(placed, call=replace(placed.call, recomputed=recomputed)) for placed in placement.calls)
    graph_calls = (replace(call, recomputed=recomputed) for call in placement.graph.calls)
    return replace(placement, graph=replace(placement.graph, calls=tuple(graph_calls)), calls=calls)


def stretches(placement: Placement, tensors: KeptTensors | None = None) -> tuple[range, ...]:
    """The calls of each stretch that is computed again, by their numbers, in a network or a stage of it; the same on
    every rank. `tensors` spares a second look at what it keeps.

    There are none where that would free nothing. The backward pass of a whole network follows its forward pass, so that
    it needs the activations at its end at once: these are not dropped. That of a stage follows when others have run.
    """
    if not any(placed.call.recomputed for placed in placement.calls):
        return ()
    return _Stretches(placement, tensors or KeptTensors(placement)).stretches


def kept_in(tensors: KeptTensors, calls: range) -> set[Kept]:
    """The tensors that any of the calls keeps."""
    return set().union(*(tensors.calls[number] for number in calls))


def inputs_of(placement: Placement, tensors: KeptTensors, stretch: range) -> set[Kept]:
    """The tensors that a stretch reads from before it, except parameters and buffers."""
    tensors_read = (tensor for number in stretch for tensor in taken_by(placement, placement.calls[number], tensors))
    return {tensor for tensor in tensors_read if tensors.producers.get(tensor, -1) not in stretch}


def taken_by(placement: Placement, placed: PlacedCall, tensors: KeptTensors) -> Iterator[Kept]:
    """The tensors that a call reads, except parameters, buffers and constants."""
    for name in placed.call.inputs:
        if placement.graph.values[name].origin in ("call", "input"):
            yield tensors.tensor(name, placed.placed.inputs[name])


class _Stretches:
    """Cuts the calls that are recomputed. Bytes are those of the first rank.

    A tensor is there from the call that gives it (`producer`), as far as a call needs it in the backward pass (`first`,
    the first that keeps it), and has to stay where a cut lies before the `last` one that needs it.
    """

    def __init__(self, placement: Placement, tensors: KeptTensors) -> None:
        self._placement, self._tensors = placement, tensors
        self._runs = list(_runs(placement))
        self._count = len(placement.calls)
        self._begins = {number: run.start for run in self._runs for number in run}
        self._measure()
        low, high = 0.0, self._total
        cuts = self._cut(high)
        for _ in range(_ROUNDS):
            peak = (low + high) / 2
            lower_cuts = self._cut(peak)
            if lower_cuts is None:
                low = peak
            else:
                high, cuts = peak, lower_cuts
        assert cuts is not None
        self.cuts = cuts
        self.stretches = tuple(stretch for stretch in cuts if self._frees(stretch))

    def _measure(self) -> None:
        """Add up the bytes of tensors by where they are made and needed."""
        size, tensors = self._count, self._tensors
        keepers: dict[Kept, list[int]] = {}
        readers: dict[Kept, list[int]] = {}
        for number, kept in enumerate(tensors.calls):
            for tensor in kept:
                keepers.setdefault(tensor, []).append(number)
            for tensor in taken_by(self._placement, self._placement.calls[number], tensors):
                if number in self._begins:
                    readers.setdefault(tensor, []).append(number)
        inside, crossing, self._stays = np.zeros((size, size)), np.zeros((size, size)), np.zeros(size)
        self._last: dict[Kept, int] = {}
        self._total = 0.0
        for tensor in (candidate for candidate in {**keepers, **readers} if candidate not in tensors.held):
            num_bytes = tensor.bytes(self._placement)
            keep, read = keepers.get(tensor, []), readers.get(tensor, [])
            self._total += num_bytes
            self._last[tensor] = last = max([*keep, *read])
            producer = tensors.producers.get(tensor, -1)
            if tensor.inside or tensor.padded or self._placement.graph.values[tensor.value].origin == "parameter":
                producer = keep[0]
            if producer in self._begins:
                crossing[producer, producer] += num_bytes
                crossing[producer, last] -= num_bytes
                if keep:
                    inside[producer, keep[0]] += num_bytes
            else:
                self._stays[producer if producer >= 0 else min([*keep, *read])] += num_bytes
        # from call i to call j: what is made and kept there, and of what is made there what stays for calls after j
        self._inside = np.cumsum(np.cumsum(inside[::-1], 0)[::-1], 1)
        self._crossing = np.cumsum(np.cumsum(crossing, 1)[::-1], 0)[::-1]
        self._staying = np.concatenate([[0.0], np.cumsum(self._stays)])

    def _cut(self, peak: float) -> list[range] | None:
        """The stretches that keep the fewest bytes, where these and the inside of each never exceed a peak; None if
        there are none."""
        kept_bytes = np.full(self._count + 1, np.inf)
        kept_bytes[0] = 0.0
        begins = np.zeros(self._count, dtype=np.int64)
        for number in range(self._count):
            start = self._begins.get(number)
            if start is None:
                kept_bytes[number + 1] = kept_bytes[number] + self._stays[number]
                if kept_bytes[number + 1] > peak:
                    return None
                continue
            places = slice(start, number + 1)
            before = kept_bytes[places] + self._staying[number + 1] - self._staying[places]
            after = before + self._crossing[places, number]
            after = np.where(before + self._inside[places, number] <= peak, after, np.inf)
            best = int(np.argmin(after))
            begins[number], kept_bytes[number + 1] = start + best, after[best]
            if not np.isfinite(kept_bytes[number + 1]) and number + 1 not in self._begins:
                return None
        return list(self._segments(begins))[::-1]

    def _segments(self, begins: NDArray[np.int64]) -> Iterator[range]:
        end = self._count
        while end:
            if end - 1 not in self._begins:
                end -= 1
                continue
            yield range(int(begins[end - 1]), end)
            end = int(begins[end - 1])

    def _frees(self, stretch: range) -> bool:
        """Whether something in a stretch need not stay, and is not needed at once."""
        if stretch.stop == self._count and not self._placement.is_part:
            return False
        inside = kept_in(self._tensors, stretch) - inputs_of(self._placement, self._tensors, stretch)
        inside -= self._tensors.held
        return any(self._last[tensor] < stretch.stop for tensor in inside)


def _runs(placement: Placement) -> Iterator[range]:
    """The longest sequences of recomputed calls between which nothing is redistributed."""
    targets_so_far: set[tuple[str, Layout]] = set()
    edges = []
    for number, placed in enumerate(placement.calls):
        targets = {(name, steps[-1].target) for name, steps in placed.transfers.items() if steps}
        follows = number > 0 and _is_recomputed(placement.calls[number - 1]) == _is_recomputed(placed)
        if not follows or targets - targets_so_far:
            edges.append(number)
        targets_so_far |= targets
    for start, stop in pairwise([*edges, len(placement.calls)]):
        if _is_recomputed(placement.calls[start]):
            yield range(start, stop)


def _is_recomputed(placed: PlacedCall) -> bool:
    """Whether a call runs again: not one that changes buffers in its own way, which would change them again."""
    return placed.call.recomputed and (placed.call.op == "batch_norm" or not placed.call.updates)
