"""How much memory a plan takes on each rank: parameters, their gradients, and what the backward pass needs kept.

Counted from the layouts: what autograd keeps for each kind of call, tensors that several calls keep once, and which
inputs a call may overwrite as nobody else reads them. What a kernel holds while it runs, the optimizer's state and the
framework itself come on top.
"""

import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from convoy.graph.graph import Call, Graph, Ref
from convoy.ops.kernel import Part
from convoy.ops.recompute import Kept, KeptTensors, inputs_of, kept_in, stretches, taken_by, with_recomputed
from convoy.ops.registry import OPERATIONS
from convoy.plans.place import Memory, Placement
from convoy.plans.stages import StagedGraph
from convoy.units import size


class Readers:
    """Who reads each value of a network, whose `outputs` it returns."""

    def __init__(self, graph: Graph, outputs: Iterable[str]) -> None:
        self._graph = graph
        self._outputs = tuple(outputs)
        self._producers = {name: call for call in graph.calls for name in call.outputs}

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        numbers = {name: len(calls) for name, calls in self._graph.consumers().items()}
        for name in self._outputs:
            numbers[name] += 1
        return numbers

    def is_spare(self, name: str, transferred: Container[str]) -> bool:
        """Whether the only call that reads a value may overwrite it; `transferred` values come to it from other
        ranks."""
        producer = self._producers.get(name)
        if producer is None or name in transferred or self._numbers[name] != 1:
            return False
        is_sum = producer.op == "elementwise" and getattr(producer.function, "__name__", "") == "add"
        return OPERATIONS[producer.op].gives_own or is_sum


# The network is captured without in-place calls, since under a plan the same tensor may be needed for sending; this
# recovers those of the original, and finds more.
def overwritten(call: Call, is_spare: Callable[[str], bool]) -> str | None:
    """The input that a call writes its result over, or None where the result has memory of its own."""
    name = getattr(call.function, "__name__", "")
    if call.op != "elementwise" or not call.inputs or set(call.kwargs) - {"inplace"}:
        return None
    if name == "relu" and call.args == (Ref(call.inputs[0]),):
        return call.inputs[0] if is_spare(call.inputs[0]) else None
    terms = tuple(map(Ref, call.inputs))
    if name == "add" and len(terms) == 2 and set(call.args) == set(terms) and not call.kwargs:
        return next((source for source in call.inputs if is_spare(source)), None)
    return None


def predict_memory(placement: Placement, in_flight: int = 1) -> list[Memory]:
    """Memory of every rank in one forward and backward pass over the whole batch that was captured, where the
    activations of `in_flight` passes are kept at once. Of activations that are computed again, as much is counted as is
    there at once: at the end of the forward pass, or while the backward pass computes one of the stretches again."""
    moments = _moments(placement)
    return [_of_rank(placement, moments, rank, in_flight) for rank in range(placement.mesh.num_devices)]


def memory_in_stages(placement: Placement, staged: StagedGraph, in_flight: Sequence[int] = ()) -> list[Memory]:
    """Memory of every rank where each runs its stage, which keeps the activations of `in_flight` passes at once (empty
    for one): all that crosses a cut stays as well, on both sides of it."""
    passes = in_flight or (1,) * staged.number
    of_stages = [predict_memory(staged.part(placement, stage), passes[stage]) for stage in range(staged.number)]
    mesh = placement.mesh
    return [of_stages[mesh.stage_of(rank)][rank] for rank in range(mesh.num_devices)]


@dataclass(frozen=True)
class _Moment:
    """A part of the network, or one that is computed again as far as one of its calls."""

    held: set[Kept]  # what it adds to the tensors that stay until the backward pass
    inside: set[Kept]  # what is there beside all that has stayed so far


def _moments(placement: Placement) -> list[_Moment]:
    tensors = KeptTensors(placement)
    moments, end = [_Moment(tensors.held, set())], 0
    for stretch in stretches(placement, tensors):
        moments.append(_Moment(kept_in(tensors, range(end, stretch.start)), set()))
        moments.append(_Moment(inputs_of(placement, tensors, stretch), set()))
        moments += [_Moment(set(), inside) for inside in _while_computed(placement, tensors, stretch)]
        end = stretch.stop
    return [*moments, _Moment(kept_in(tensors, range(end, len(placement.calls))), set())]


def _while_computed(placement: Placement, tensors: KeptTensors, stretch: range) -> Iterator[set[Kept]]:
    """The tensors that are there while each call of a stretch runs: what is kept so far, and what later calls read."""
    readers = Readers(placement.graph, placement.outputs)
    last: dict[Kept, int] = {}
    for number in stretch:
        last |= dict.fromkeys(taken_by(placement, placement.calls[number], tensors), number)
    keepers = [number for number in stretch if tensors.calls[number]]
    kept: set[Kept] = set()
    live_tensors: set[Kept] = set()
    for number in range(stretch.start, keepers[-1] + 1 if keepers else stretch.start):
        placed = placement.calls[number]
        kept |= tensors.calls[number]
        live_tensors = {tensor for tensor in live_tensors if last.get(tensor, -1) >= number}
        name_overwritten = overwritten(placed.call, partial(readers.is_spare, transferred=placed.transfers))
        if name_overwritten is not None:
            live_tensors.discard(tensors.tensor(name_overwritten, placed.placed.inputs[name_overwritten]))
        live_tensors |= {tensors.tensor(name, layout) for name, layout in placed.placed.outputs.items()}
        yield kept | live_tensors


def what_is_recomputed(
    placement: Placement, staged: StagedGraph | None = None, in_flight: Sequence[int] = ()
) -> str | None:
    """A sentence on what is computed again, and what that saves on the rank that needs most; None where nothing is.
    `in_flight` is as in `memory_in_stages`."""
    layers_to_recompute = {placed.call.layer for placed in placement.calls if placed.call.recomputed}
    if not layers_to_recompute:
        return None
    parts = [placement] if staged is None else [staged.part(placement, stage) for stage in range(staged.number)]
    runs = [[part.calls[number].call.layer for number in stretch] for part in parts for stretch in stretches(part)]
    if not runs:
        return "the backward pass computes no layer again: that would free nothing, as what they give is needed at once"
    layers = {layer for stretch in runs for layer in stretch if layer}
    all_layers = {placed.call.layer for placed in placement.calls if placed.call.layer}
    bytes_with, bytes_without = (
        _most(variant, staged, in_flight) for variant in (placement, with_recomputed(placement, False))
    )
    number = "one stretch" if len(runs) == 1 else f"{len(runs)} stretches"
    return (
        f"the backward pass computes {len(layers)} of {len(all_layers)} layers again, in {number}: activations take "
        f"{size(bytes_with)} at most, not {size(bytes_without)} (predicted)"
    )


def _most(placement: Placement, staged: StagedGraph | None, in_flight: Sequence[int]) -> int:
    """Bytes of activations on the rank that has most."""
    memories = predict_memory(placement) if staged is None else memory_in_stages(placement, staged, in_flight)
    return max(memory.activations for memory in memories)


def _of_rank(placement: Placement, moments: list[_Moment], rank: int, in_flight: int) -> Memory:
    mesh, graph = placement.mesh, placement.graph
    place = mesh.coordinates(rank)
    of_origin, gradients = {"parameter": 0, "buffer": 0}, 0
    for value in graph.values.values():
        if value.origin in of_origin and value.name in placement.layouts:
            layout = placement.layouts[value.name]
            num_bytes = math.prod(layout.local_shape(value.shape, mesh, place)) * value.dtype.itemsize
            of_origin[value.origin] += num_bytes
            gradients += num_bytes if graph.training and value.origin == "parameter" and value.trains else 0
    calls = {placed.call.name: placed for placed in placement.calls}

    @functools.cache
    def sized(tensor: Kept) -> tuple[object, int]:
        """What it is, the same for what is there once on this rank, whatever the layouts of others; and its bytes."""
        whole = graph.shape(tensor.value)
        parts = tuple(tensor.layout.parts(dim, mesh, place, size) for dim, size in enumerate(whole))
        shape, padding = [len(part) for part in parts], [0] * len(parts)
        if tensor.padded:
            placed = calls[tensor.padded]
            options = OPERATIONS[placed.call.op].local_options
            assert options is not None
            paddings = options(Part.of(placed, graph, mesh, place))["padding"]
            padding[2:] = [before + after for _, before, after in paddings]
        of_call = tensor.padded if any(padding) else ""
        size = math.prod(map(sum, zip(shape, padding, strict=True))) * tensor.itemsize
        return (tensor.value, parts, tensor.itemsize, tensor.inside, of_call), size

    held: dict[object, int] = {}
    most = 0
    for moment in moments:
        held |= dict(map(sized, moment.held))
        inside = dict(map(sized, moment.inside))
        most = max(most, sum(held.values()) + sum(size for key, size in inside.items() if key not in held))
    of_other_passes = (in_flight - 1) * sum(held.values())
    return Memory(of_origin["parameter"], gradients, of_origin["buffer"], most + of_other_passes)
