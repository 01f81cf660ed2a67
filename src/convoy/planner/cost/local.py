"""From a placed call to its operation: what a rank computes for it."""

import math
from collections.abc import Container
from typing import Any, Literal

import torch

from convoy.graph.graph import Call, Graph, Ref
from convoy.ops import OPERATIONS
from convoy.ops.memory import overwritten
from convoy.ops.placing import sharing_axes
from convoy.planner.cost.local_op import LocalOp, Operand, Option, dtype_name, graph_facts
from convoy.plans.layout import Layout
from convoy.plans.mesh import Coordinates, Mesh
from convoy.plans.place import Placed, PlacedCall, Placement

BatchNorm = Literal["sync", "microbatch", "local"]


def local_op(
    placed: PlacedCall, placement: Placement, rank: int, *, batch_norm: BatchNorm = "sync", microbatch: int = 0
) -> LocalOp:
    """What a rank computes for a call. `microbatch` is the samples of each, 0 for one microbatch a pass."""
    place = placement.mesh.coordinates(rank)
    op = local_op_at(placed.call, placed.placed, placement.graph, placement.mesh, place, placed.transfers)
    if op.op != "batch_norm":
        return op
    return _normalized(op, placed, placement, batch_norm, microbatch)


def local_op_at(
    call: Call, placed: Placed, graph: Graph, mesh: Mesh, place: Coordinates, transferred: Container[str] = ()
) -> LocalOp:
    """The operation of a call that is in no placement yet, at a place on the mesh, with batch norm over all samples.
    `transferred` names the inputs that come from other ranks."""
    facts = graph_facts(graph)

    def operand(name: str, layout: Layout) -> Operand:
        value = graph.values[name]
        role: Any = "activation" if value.origin in ("call", "input") else value.origin
        shape = layout.local_shape(value.shape, mesh, place)
        gradient, adds = name in facts.differentiable, name in facts.adding[call.name]
        return Operand(shape, dtype_name(value.dtype), role, gradient, adds)

    operation = OPERATIONS[call.op]
    order = dict.fromkeys(call.attributes[key] for key in operation.operands if call.attributes.get(key))
    inputs = tuple(operand(name, placed.inputs[name]) for name in dict.fromkeys((*order, *call.inputs)))
    outputs = tuple(operand(name, placed.outputs[name]) for name in call.outputs)
    options = {name: call.attributes.get(name) for name in operation.options}
    if operation.local_options is not None:
        options |= operation.local_options(call, placed, graph, mesh, place)
    if operation.shared_dims is not None:
        options["ranks"] = mesh.size(sharing_axes(call, placed, graph))
    options = {name: _plain(value) for name, value in options.items()}
    if operation.by_arguments:
        options["called"] = _called(call)
        if overwritten(call, lambda name: name in facts.spare and name not in transferred) is not None:
            options["overwrites"] = True
    function = getattr(call.function, "__name__", "").strip("_") if operation.by_function else ""
    return LocalOp(call.op, function, inputs, outputs, tuple(sorted(options.items())))


def _normalized(
    op: LocalOp, placed: PlacedCall, placement: Placement, batch_norm: BatchNorm, microbatch: int
) -> LocalOp:
    """Batch norm whose statistics are not those of all samples: over each microbatch, or over the rank's own."""
    options = dict(op.options)
    if not options["training"] or batch_norm == "sync":
        return op
    layout = placed.placed.inputs[placed.call.attributes["input"]]
    pixel_axes = tuple(sorted(axis for dim, split in layout.splits if dim > 1 for axis in split.axes))
    options["ranks"] = placement.mesh.size(pixel_axes)
    samples = op.inputs[placed.call.inputs.index(placed.call.attributes["input"])].shape[0]
    options["parts"] = -(-samples // microbatch) if batch_norm == "microbatch" and microbatch else 1
    return LocalOp(op.op, op.function, op.inputs, op.outputs, tuple(sorted(options.items())))


def _called(call: Call) -> Option:
    """The arguments, with tensors as their position among the inputs."""
    places = {name: place for place, name in enumerate(call.inputs)}

    def plain(value: Any) -> Option:
        return f"${places.get(value.name, -1)}" if isinstance(value, Ref) else _plain(value, plain)

    kwargs = tuple((name, plain(value)) for name, value in sorted(call.kwargs.items()) if name != "inplace")
    return tuple(plain(value) for value in call.args), kwargs


def _plain(value: Any, convert: Any = None) -> Option:
    """What JSON can say, the same in every process."""
    convert = convert or _plain
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, list | tuple):
        return tuple(convert(item) for item in value)
    if isinstance(value, slice):
        return tuple(convert(item) for item in (value.start, value.stop, value.step))
    return type(value).__name__
