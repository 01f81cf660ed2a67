"""What ranks exchange for normalisations: inside a call, where they hold parts of what is normalised together, and once
in an update, for the running statistics of batch norm.
"""

from dataclasses import dataclass
from math import prod

from convoy.cost.link import Kind
from convoy.cost.local import BatchNorm, sharing_axes
from convoy.cost.message import Message
from convoy.cost.piece import Piece
from convoy.graph.graph import Graph
from convoy.plans.mesh import Axes, Mesh
from convoy.plans.place import PlacedCall, Placement


@dataclass(frozen=True)
class Inside:
    """Messages of one rank inside a call.

    Attributes:
        axes: over which they go; empty where there are none.
        forward, backward: kind and bytes of each, as `Link.seconds` takes them.
    """

    axes: Axes = ()
    forward: tuple[tuple[Kind, int], ...] = ()
    backward: tuple[tuple[Kind, int], ...] = ()


def inside(placed: PlacedCall, graph: Graph, mesh: Mesh, own: Piece, batch_norm: BatchNorm = "sync") -> Inside:
    """The messages inside a call, on a rank whose piece of it is `own`: those of the engine's kernels."""
    call = placed.call
    if call.op not in ("softmax", "batch_norm", "group_norm", "layer_norm"):
        return Inside()
    source = call.attributes["input"]
    layout = placed.placed.inputs[source]
    axes = sharing_axes(call, placed.placed, graph)
    if call.op == "batch_norm" and (batch_norm != "sync" or not graph.training):
        samples = layout.split(0)
        axes = tuple(axis for axis in axes if samples is None or axis not in samples.axes)
    others = mesh.size(axes) - 1
    if others == 0:
        return Inside()
    shape = own.inputs[call.inputs.index(source)].shape
    itemsize = max(4, graph.values[source].dtype.itemsize)
    if call.op == "softmax":
        size = prod(shape) // max(1, shape[call.attributes["dim"]]) * itemsize
        return Inside(axes, (("exchange", others * size), ("all_reduce", size)), (("all_reduce", size),))
    if call.op == "batch_norm":
        numbers = shape[1]
    elif call.op == "group_norm":
        numbers = shape[0] * call.attributes["num_groups"]
    else:
        numbers = prod(shape[: len(shape) - len(call.attributes["normalized_shape"])])
    size = 2 * numbers * itemsize
    return Inside(axes, (("exchange", others * size),), (("all_reduce", size),))


def running_statistics(placement: Placement, batch_norm: BatchNorm, microbatch: int, passes: int) -> list[Message]:
    """The messages before an update that make running statistics those of the whole batch.

    Over microbatches, every rank gathers the mean and variance of all others' microbatches; over the ranks' own
    samples, the buffers are averaged. Over all samples they are the same on every rank already.
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
        found = sums.setdefault(axes, [0] * mesh.num_devices)
        for rank in range(mesh.num_devices):
            samples, channels, *_ = layout.local_shape(shape, mesh, mesh.coordinates(rank))
            terms = 1 if batch_norm == "local" else passes * (-(-samples // microbatch) if microbatch else 1)
            found[rank] += 2 * channels * terms * graph.values[call.attributes["running_mean"]].dtype.itemsize
    messages = []
    for axes, numbers in sums.items():
        if axes and batch_norm == "local":
            messages.append(Message(axes, "all_reduce", tuple(numbers)))
        elif axes:
            messages.append(Message(axes, "exchange", tuple((mesh.size(axes) - 1) * size for size in numbers)))
    return messages
