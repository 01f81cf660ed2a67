"""The engine's program of a placed network in numbers: calls and transfers in their order, with what each rank does,
and the messages in which gradients are added up.

It mirrors `convoy.engine.program`: a value is redistributed before the first call that wants it so, and the backward
pass runs through the same items the other way round. It adds what the plan adds to the network: copies for the sake of
messages, and what ranks exchange for normalizations, inside a call and, for running statistics, once in an update.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import torch

from convoy.graph.graph import Graph
from convoy.ops import OPERATIONS
from convoy.ops.postponed import joins, postponed_part
from convoy.ops.recompute import stretches
from convoy.ops.registry import sharing_axes
from convoy.planner.cost.link import Collective, Message
from convoy.planner.cost.local_op import BatchNorm, LocalOp, Operand, Option, dtype_name, local_op
from convoy.plans.buckets import Item as Gradient
from convoy.plans.buckets import Sizes, plan_buckets
from convoy.plans.layout import WHOLE, Layout
from convoy.plans.mesh import Axes, Coordinates, Mesh
from convoy.plans.place import PlacedCall, Placement
from convoy.plans.traffic import Sent, transfer_traffic
from convoy.plans.transfer import Step


def moved(
    step: Step, shape: tuple[int, ...], dtype: str, differentiable: bool, mesh: Mesh, place: Coordinates
) -> LocalOp:
    """What a rank copies for a transfer, beside what it sends: packing, putting together, clones of sums. `shape` is
    that of the whole tensor."""
    before, after = (
        Operand(layout.local_shape(shape, mesh, place), dtype, "activation", differentiable)
        for layout in (step.source, step.target)
    )
    forward, backward = {
        "reduce": (2 * before.bytes, 0),
        "copy": (0, 2 * before.bytes),
        "keep": (0, before.bytes),
        "slice": (2 * after.bytes, 2 * before.bytes),
        "gather": (2 * after.bytes, 2 * before.bytes),
        "reduce_scatter": (2 * before.bytes, 2 * before.bytes),
        "move": (2 * (before.bytes + after.bytes), 2 * (before.bytes + after.bytes)),
    }[step.kind]
    options: dict[str, Option] = {"forward": forward, "backward": backward if differentiable else 0}
    options["ranks"] = mesh.size(step.axes)
    return LocalOp("redistribute", step.kind, (before,), (after,), tuple(sorted(options.items())))


def copied(num_bytes: int, times: int = 1) -> LocalOp:
    """A copy of so many bytes, as into a message and out of it; `times` 2 for one added to what is there."""
    operand = Operand((num_bytes // 4,), "float32")
    return LocalOp("copy", "", (operand,) * times, (operand,))


def parameter_bytes(op: LocalOp) -> int:
    """Bytes of a call's weight and bias."""
    return sum(operand.bytes for operand in op.inputs if operand.role == "parameter")


def joined(op: LocalOp, number: float) -> LocalOp | None:
    """A call with the samples of `number` passes (a part of one for a smaller pass), as the weight's gradients of all
    of them are computed in one; None where each is computed by itself."""
    operands = (*op.inputs, *op.outputs)
    moved = sum(prod(operand.shape) for operand in operands if operand.role == "activation")
    weight = max((prod(operand.shape) for operand in operands if operand.role == "parameter"), default=0)
    if number <= 1 or not joins(moved, weight):
        return None

    def larger(operand: Operand) -> Operand:
        if operand.role != "activation" or not operand.shape:
            return operand
        return replace(operand, shape=(round(number * operand.shape[0]), *operand.shape[1:]))

    inputs, outputs = (tuple(map(larger, operands)) for operands in (op.inputs, op.outputs))
    return replace(op, inputs=inputs, outputs=outputs)


@dataclass(frozen=True)
class InternalMessages:
    """Messages of one rank inside a call."""

    axes: Axes = ()  # over which they go; empty where there are none
    forward: tuple[tuple[Collective, int], ...] = ()  # kind and bytes, as `Link.seconds` takes them
    backward: tuple[tuple[Collective, int], ...] = ()


def internal_messages(
    placed: PlacedCall, graph: Graph, mesh: Mesh, op: LocalOp, batch_norm: BatchNorm = "sync"
) -> InternalMessages:
    """The messages inside a call, on a rank whose operation of it is `op`: those of its kernel."""
    call = placed.call
    operation = OPERATIONS[call.op]
    if operation.statistics is None:
        return InternalMessages()
    source = call.attributes["input"]
    layout = placed.placed.inputs[source]
    axes = sharing_axes(call, placed.placed, graph)
    if call.op == "batch_norm" and (batch_norm != "sync" or not graph.training):
        samples = layout.split(0)
        axes = tuple(axis for axis in axes if samples is None or axis not in samples.axes)
    peers = mesh.size(axes) - 1
    if peers == 0:
        return InternalMessages()
    shape = op.inputs[call.inputs.index(source)].shape
    itemsize = max(4, graph.values[source].dtype.itemsize)
    size = operation.statistics(call, shape) * itemsize
    return InternalMessages(axes, (("exchange", peers * size),), (("all_reduce", size),))


def running_statistics(placement: Placement, batch_norm: BatchNorm) -> list[Message]:
    """The messages before an update that make running statistics those of the whole batch.

    Over microbatches, the ranks add up what each one's are to add to mean and variance; over the ranks' own samples,
    the buffers are averaged. Over all samples they are the same on every rank already. In reproducible mode, of which
    the planner knows nothing, every rank gathers those of all microbatches instead.
    """
    graph, mesh = placement.graph, placement.mesh
    sums: dict[Axes, list[int]] = {}
    for placed in placement.calls if batch_norm != "sync" and graph.training else ():
        call = placed.call
        if call.op != "batch_norm" or not call.attributes["training"] or not call.attributes["running_mean"]:
            continue
        layout, shape = placed.placed.inputs[call.attributes["input"]], graph.shape(call.attributes["input"])
        split = layout.split(0)
        axes = tuple(axis for axis in split.axes if mesh.sizes[axis] > 1) if split else ()
        of_ranks = sums.setdefault(axes, [0] * mesh.num_devices)
        for rank in range(mesh.num_devices):
            channels = layout.local_shape(shape, mesh, mesh.coordinates(rank))[1]
            of_ranks[rank] += 2 * channels * graph.values[call.attributes["running_mean"]].dtype.itemsize
    return [Message(axes, "all_reduce", tuple(numbers)) for axes, numbers in sums.items() if axes]


@dataclass
class Item:
    """A call, or one step of a transfer."""

    layer: str  # of a transfer, the layer that asks for it
    name: str  # the call's, or the value's and the step's
    is_transfer: bool
    local_ops: tuple[LocalOp, ...]  # of each rank: what it computes, or copies for a transfer
    forward: tuple[Message, ...]  # in order
    backward: tuple[Message, ...]
    differentiable: bool  # it takes part in the backward pass
    takes: tuple[str, ...]  # values whose gradients it gives
    parameters: tuple[str, ...] = ()  # whose gradients are complete when its backward pass is done
    postponed: float = 0.0  # the part of its backward pass that zero-bubble does later
    again: tuple["Item", ...] = ()  # computed again before its backward pass begins, without what they exchange


def program(placement: Placement, batch_norm: BatchNorm = "sync", microbatch: int = 0) -> list[Item]:
    """The items of one pass, in the order of its forward pass."""
    graph, mesh = placement.graph, placement.mesh
    places = [mesh.coordinates(rank) for rank in range(mesh.num_devices)]
    kinds: dict[LocalOp, LocalOp] = {}  # equal operations are one object, which is quick to compare

    @cache
    def copies(step: Step, shape: tuple[int, ...], dtype: str, has_gradient: bool) -> tuple[LocalOp, ...]:
        ops = (moved(step, shape, dtype, has_gradient, mesh, place) for place in places)
        return tuple(kinds.setdefault(op, op) for op in ops)

    transfers: dict[str, list[Item]] = {}
    for sent in transfer_traffic(placement):
        value, has_gradient = graph.values[sent.value], sent.value in graph.differentiable
        ops = copies(sent.step, value.shape, dtype_name(value.dtype), has_gradient)
        transfers.setdefault(sent.call, []).append(_transfer(sent, ops, mesh, has_gradient))
    items: list[Item] = []
    calls: list[Item] = []
    for placed in placement.calls:
        for item in transfers.get(placed.call.name, ()):
            item.layer = placed.call.layer
            items.append(item)
        calls.append(_call(placed, placement, places, batch_norm, microbatch, kinds))
        items.append(calls[-1])
    items += transfers.get("", ())
    completed: set[str] = set()  # gradients of parameters: at the first item of the forward pass that takes them
    for item in items:
        parameters = [name for name in item.takes if graph.values[name].origin == "parameter"]
        item.parameters = tuple(name for name in parameters if name not in completed)
        completed.update(parameters)
    for stretch in stretches(placement) if graph.training else ():
        recomputed = calls[stretch.start : stretch.stop]
        last = next((item for item in reversed(recomputed) if item.differentiable), None)
        if last is not None:
            last.again = tuple(recomputed)
    return items


def _call(
    placed: PlacedCall,
    placement: Placement,
    places: Sequence[Coordinates],
    batch_norm: BatchNorm,
    microbatch: int,
    kinds: dict[LocalOp, LocalOp],
) -> Item:
    call, graph, mesh = placed.call, placement.graph, placement.mesh
    takes = tuple(name for name in call.inputs if name in graph.differentiable)
    backward = bool(takes) and bool(graph.differentiable.intersection(call.outputs))
    asked: dict[tuple[object, ...], tuple[LocalOp, InternalMessages]] = {}  # once for all ranks that compute alike
    ranks = []
    for rank, place in enumerate(places):
        signature = tuple(_signature(placed, place, mesh))
        if signature not in asked:
            op = local_op(placed, placement, rank, batch_norm=batch_norm, microbatch=microbatch)
            op = kinds.setdefault(op, op)
            asked[signature] = op, internal_messages(placed, graph, mesh, op, batch_norm)
        ranks.append(asked[signature])
    local_ops, inside = zip(*ranks, strict=True)
    forward, back = (
        tuple(
            Message(inside[0].axes, of_ranks[0][0], tuple(size for _, size in of_ranks))
            for of_ranks in zip(*(getattr(of_rank, way) for of_rank in inside), strict=True)
        )
        for way in ("forward", "backward")
    )
    if not backward:
        return Item(call.layer, call.name, False, local_ops, forward, (), False, ())
    postponed = postponed_part(placed, graph)
    return Item(call.layer, call.name, False, local_ops, forward, back, True, takes, postponed=postponed)


def _transfer(sent: Sent, copies: tuple[LocalOp, ...], mesh: Mesh, differentiable: bool) -> Item:
    step, name = sent.step, sent.value
    axes = tuple(axis for axis in step.axes if mesh.sizes[axis] > 1)

    def message(way: str, sums: str) -> tuple[Message, ...]:
        numbers = tuple(getattr(traffic, way) for traffic in sent.ranks)
        if not any(numbers) or not axes:
            return ()
        if step.kind == sums:
            return (Message(axes, "all_reduce", tuple(op.inputs[0].bytes for op in copies)),)
        return (Message(axes, "exchange", numbers),)

    backward = message("backward", "copy") if differentiable else ()
    takes = (name,) if differentiable else ()
    return Item("", f"{step.kind} {name}", True, copies, message("forward", "reduce"), backward, differentiable, takes)


def _signature(placed: PlacedCall, place: Coordinates, mesh: Mesh) -> Iterator[object]:
    """What of a place decides about a call's operation: sizes of parts, rows themselves, and who adds the bias."""
    for layouts in (placed.placed.inputs, placed.placed.outputs):
        for layout in layouts.values():
            for dim, split in layout.splits:
                part = split.parts[mesh.index(place, split.axes)]
                yield (part[0], part[-1]) if dim > 1 and len(part) else len(part)
            if layout.partial:
                yield all(place[axis] == 0 for axis in layout.partial)


@dataclass(frozen=True)
class GradientMessage(Message):
    """One message of the exchange, over the axes over which its gradients are added."""

    layer: str  # the first of those whose gradients are in it
    parameters: tuple[str, ...]  # none in a message that only counts users
    copied: tuple[int, ...]  # bytes that each rank copies into it; 0 where the gradient itself is sent

    @property
    def name(self) -> str:
        more = f" and {len(self.parameters) - 1} more" if len(self.parameters) > 1 else ""
        return f"{self.parameters[0]}{more}" if self.parameters else "users"


@dataclass(frozen=True)
class Exchange:
    """How the gradients of a step are added."""

    messages: tuple[GradientMessage, ...]  # in the order in which they are sent
    held: tuple[int, ...]  # bytes of parameters of each rank
    tensors: int  # number of parameters


def exchange(placement: Placement, order: Sequence[str], sizes: Sizes) -> Exchange:
    """The messages of `engine.gradients.reducer`. `order` names the parameters that ranks hold, as their gradients
    become ready."""
    graph, mesh = placement.graph, placement.mesh
    held = held_bytes(placement, order)
    axes_of = {name: axes for name in order if (axes := gradient_axes(placement, name))}
    names = list(axes_of)
    dtypes = [graph.values[name].dtype for name in names]
    items = [
        Gradient(axes_of[name], dtype, torch.device("meta"), max(held[name]) // dtype.itemsize)
        for name, dtype in zip(names, dtypes, strict=True)
    ]
    layers: dict[str, str] = {}
    for placed in placement.calls:
        for name in placed.call.inputs:
            layers.setdefault(name, placed.call.layer)
    messages = []
    for bucket in plan_buckets(items, range(len(items)), sizes):
        members = tuple(names[member] for member in bucket.members)
        itemsize = items[(bucket.members or bucket.tally)[0]].dtype.itemsize
        layer = layers.get(members[0], "") if members else ""
        by_rank = tuple(sum(held[name][rank] for name in members) for rank in range(mesh.num_devices))
        sent = tuple(size + len(bucket.tally) * itemsize for size in by_rank)
        copies = (0,) * len(by_rank) if bucket.alone else by_rank
        messages.append(GradientMessage(bucket.axes, "all_reduce", sent, layer, members, copies))
    whole = tuple(sum(row[rank] for row in held.values()) for rank in range(mesh.num_devices))
    return Exchange(tuple(messages), whole, len(held))


def gradient_axes(placement: Placement, name: str) -> Axes:
    """The axes of several ranks over which a parameter's gradient is added."""
    layout, sizes = placement.layouts.get(name, WHOLE), placement.mesh.sizes
    return tuple(sorted(axis for axis in layout.copied if sizes[axis] > 1))


def weights_of(placement: Placement) -> list[str]:
    """The parameters that ranks train, in the order of the network: of a stage its own, else all, used or not."""
    names = (value.name for value in placement.graph.parameters() if value.trains)
    return [name for name in names if name in placement.layouts or not placement.is_part]


def held_bytes(placement: Placement, parameters: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The bytes of some parameters on each rank."""
    mesh = placement.mesh
    places = [mesh.coordinates(rank) for rank in range(mesh.num_devices)]
    numels: dict[tuple[Layout, tuple[int, ...]], tuple[int, ...]] = {}  # blocks repeat
    by_name = {}
    for value in map(placement.graph.values.__getitem__, parameters):
        layout = placement.layouts.get(value.name, WHOLE)
        if (layout, value.shape) not in numels:
            numels[layout, value.shape] = tuple(layout.numel(value.shape, mesh, place) for place in places)
        by_name[value.name] = tuple(numel * value.dtype.itemsize for numel in numels[layout, value.shape])
    return by_name
