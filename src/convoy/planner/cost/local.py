"""From a placed call to its piece: what a rank computes for it."""

import math
from collections.abc import Container
from typing import Any, Literal

import torch

from convoy.graph.graph import Call, Graph, Ref
from convoy.planner.cost.local_op import Operand, Option, Piece, about, dtype_name
from convoy.plans.layout import Layout
from convoy.plans.memory import overwritten
from convoy.plans.mesh import Axes, Coordinates, Mesh
from convoy.plans.place import PlacedCall, Placement
from convoy.plans.rules import Placed
from convoy.plans.rules.convolution import paddings_of, window_of
from convoy.plans.rules.pool import windows_of

BatchNorm = Literal["sync", "microbatch", "local"]

_ATTRIBUTES = {
    "adaptive_avg_pool": (),
    "adaptive_max_pool": (),
    "cat": ("dim",),
    "dropout": ("channels",),
    "group_norm": ("num_groups",),
    "interpolate": ("mode", "align_corners"),
    "layer_norm": ("normalized_shape",),
    "lrn": ("size",),
    "pad": ("mode",),
    "permute": ("order",),
    "random": ("draw",),
    "reduce": ("dims", "keepdim"),
    "softmax": ("dim",),
}
"""Attributes of a call that decide about its time; of the others the local shapes say enough."""
_CALLED = ("elementwise", "opaque")
_NAMED = ("elementwise", "interpolate", "opaque", "random", "reduce", "softmax")


def piece(
    placed: PlacedCall, placement: Placement, rank: int, *, batch_norm: BatchNorm = "sync", microbatch: int = 0
) -> Piece:
    """What a rank computes for a call.

    Args:
        placed: the call.
        placement: that it is in.
        rank: whose part.
        batch_norm: what the network's batch norm layers take their statistics over.
        microbatch: samples of each, where that is over microbatches; 0 for one microbatch a pass.
    """
    place = placement.mesh.coordinates(rank)
    found = local_piece(placed.call, placed.placed, placement.graph, placement.mesh, place, placed.transfers)
    if found.op != "batch_norm":
        return found
    return _normalized(found, placed, placement, batch_norm, microbatch)


def local_piece(
    call: Call, placed: Placed, graph: Graph, mesh: Mesh, place: Coordinates, transferred: Container[str] = ()
) -> Piece:
    """The same of a call that is in no placement yet, at a place on the mesh; batch norm over all samples.

    Args:
        call: of `graph`.
        placed: its layouts on `mesh`.
        graph, mesh: the network and the devices.
        place: of the rank.
        transferred: names of the inputs that come to it from other ranks.
    """
    known = about(graph)

    def operand(name: str, layout: Layout) -> Operand:
        value = graph.values[name]
        role: Any = "activation" if value.origin in ("call", "input") else value.origin
        shape = layout.local_shape(value.shape, mesh, place)
        gradient, adds = name in known.differentiable, name in known.adding[call.name]
        return Operand(shape, dtype_name(value.dtype), role, gradient, adds)

    inputs = _main_first(call, tuple(operand(name, placed.inputs[name]) for name in call.inputs))
    outputs = tuple(operand(name, placed.outputs[name]) for name in call.outputs)
    options = {name: _plain(call.attributes.get(name)) for name in _ATTRIBUTES.get(call.op, ())}
    partial = bool(outputs) and bool(placed.outputs[call.outputs[0]].partial)
    match call.op:
        case "conv":
            options |= _of_convolution(call, placed, graph, mesh, place)
        case "max_pool" | "avg_pool":
            options |= _of_pool(call, placed, graph, mesh, place)
        case "batch_norm":
            options |= {"training": bool(call.attributes["training"] and graph.training)}
    if call.op in ("conv", "linear") and partial and call.attributes["bias"] is not None:
        options["bias"] = all(place[axis] == 0 for axis in placed.outputs[call.outputs[0]].partial)
    if call.op in ("softmax", "batch_norm", "group_norm", "layer_norm"):
        options["ranks"] = mesh.size(sharing_axes(call, placed, graph))
    if call.op in _CALLED:
        options["called"] = _called(call)
        if overwritten(call, lambda name: name in known.spare and name not in transferred) is not None:
            options["overwrites"] = True
    function = getattr(call.function, "__name__", "").strip("_") if call.op in _NAMED else ""
    return Piece(call.op, function, inputs, outputs, tuple(sorted(options.items())))


def sharing_axes(call: Call, placed: Placed, graph: Graph) -> Axes:
    """The axes over which ranks exchange statistics inside a call, because they hold parts of what it normalizes."""
    source = call.attributes["input"]
    layout, rank = placed.inputs[source], len(graph.shape(source))
    match call.op:
        case "softmax":
            dims = {call.attributes["dim"] % rank}
        case "batch_norm":
            dims = {0, *range(2, rank)} if call.attributes["training"] else set()
        case "group_norm":
            dims = set(range(2, rank)) | ({1} if _cuts_groups(call, layout, graph) else set())
        case "layer_norm":
            dims = set(range(rank - len(call.attributes["normalized_shape"]), rank))
        case _:
            dims = set()
    return tuple(sorted(axis for dim, split in layout.splits if dim in dims for axis in split.axes))


def _cuts_groups(call: Call, layout: Layout, graph: Graph) -> bool:
    """Whether the channels of a group lie on several ranks."""
    split = layout.split(1)
    size = graph.shape(call.attributes["input"])[1] // call.attributes["num_groups"]
    return split is not None and any(len(part) % size or (len(part) and part[0] % size) for part in split.parts)


def _main_first(call: Call, inputs: tuple[Operand, ...]) -> tuple[Operand, ...]:
    """Input, weight and bias in this order, however they were passed."""
    keys = ("input", "weight", "bias") if call.op in ("conv", "linear") else ("a", "b") if call.op == "matmul" else ()
    named = [call.attributes.get(key) for key in keys]
    order = [call.inputs.index(name) for name in dict.fromkeys(named) if name in call.inputs]
    order += [place for place in range(len(inputs)) if place not in order]
    return tuple(inputs[place] for place in order)


def _of_convolution(call: Call, placed: Placed, graph: Graph, mesh: Mesh, place: Coordinates) -> dict[str, Option]:
    attributes, output = call.attributes, placed.outputs[call.outputs[0]]
    group = graph.shape(attributes["input"])[1] // attributes["groups"]
    mine = placed.inputs[attributes["input"]].parts(1, mesh, place, group * attributes["groups"])
    found: dict[str, Option] = {name: _plain(attributes[name]) for name in ("stride", "dilation", "transposed")}
    found["groups"] = max(1, len(mine) // group) if attributes["groups"] > 1 else 1
    if not attributes["transposed"]:
        found["padding"] = tuple(paddings_of(graph, call, output, mesh, place))
    elif any(dim > 1 for dim, _ in output.splits):
        needs = []
        for dim in range(2, len(graph.shape(call.outputs[0]))):
            rows = output.parts(dim, mesh, place, graph.shape(call.outputs[0])[dim])
            assert isinstance(rows, range)
            need = window_of(graph, call, dim).needed(rows)
            needs.append((0, need.before, need.after))
        found["padding"] = tuple(needs)
    else:
        found["padding"] = tuple((before, 0, after - before) for before, after in attributes["padding"])
        found["output_padding"] = _plain(attributes["output_padding"])
    return found


def _of_pool(call: Call, placed: Placed, graph: Graph, mesh: Mesh, place: Coordinates) -> dict[str, Option]:
    attributes, output = call.attributes, placed.outputs[call.outputs[0]]
    found = {name: _plain(attributes.get(name)) for name in ("kernel", "stride", "dilation", "ceil_mode")}
    windows = windows_of(graph, call)
    if not any(dim in windows for dim, _ in output.splits):
        found["padding"] = tuple((both, 0, 0) for both in attributes["padding"])
        return found
    paddings: list[Option] = []
    for dim, window in windows.items():
        rows = output.parts(dim, mesh, place, graph.shape(call.outputs[0])[dim])
        need = window.needed(rows) if window is not None and isinstance(rows, range) else None
        paddings.append((0, need.before, need.after) if need else (0, 0, 0))
    found["padding"] = tuple(paddings)
    return found


def _normalized(
    found: Piece, placed: PlacedCall, placement: Placement, batch_norm: BatchNorm, microbatch: int
) -> Piece:
    """Batch norm whose statistics are not those of all samples: over each microbatch, or over the rank's own."""
    options = dict(found.options)
    if not options["training"] or batch_norm == "sync":
        return found
    layout = placed.placed.inputs[placed.call.attributes["input"]]
    others = tuple(sorted(axis for dim, split in layout.splits if dim > 1 for axis in split.axes))
    options["ranks"] = placement.mesh.size(others)
    samples = found.inputs[placed.call.inputs.index(placed.call.attributes["input"])].shape[0]
    options["parts"] = -(-samples // microbatch) if batch_norm == "microbatch" and microbatch else 1
    return Piece(found.op, found.function, found.inputs, found.outputs, tuple(sorted(options.items())))


def _called(call: Call) -> Option:
    """The arguments, tensors as their position among the inputs."""
    places = {name: place for place, name in enumerate(call.inputs)}

    def plain(value: Any) -> Option:
        return f"${places.get(value.name, -1)}" if isinstance(value, Ref) else _plain(value, plain)

    kwargs = tuple((name, plain(value)) for name, value in sorted(call.kwargs.items()) if name != "inplace")
    return tuple(plain(value) for value in call.args), kwargs


def _plain(value: Any, each: Any = None) -> Option:
    """What JSON can say, the same in every process."""
    each = each or _plain
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, list | tuple):
        return tuple(each(item) for item in value)
    if isinstance(value, slice):
        return tuple(each(item) for item in (value.start, value.stop, value.step))
    return type(value).__name__
