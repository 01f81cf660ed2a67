"""What ranks exchange inside a call: the statistics of a normalisation whose parts they hold together."""

from dataclasses import dataclass
from math import prod

from convoy.cost.link import Kind
from convoy.cost.local import BatchNorm, sharing_axes
from convoy.graph.graph import Graph
from convoy.plans.mesh import Axes, Coordinates, Mesh
from convoy.plans.place import PlacedCall


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


def inside(placed: PlacedCall, graph: Graph, mesh: Mesh, place: Coordinates, batch_norm: BatchNorm = "sync") -> Inside:
    """The messages inside a call at a place: those of the engine's kernels."""
    call = placed.call
    if call.op not in ("softmax", "batch_norm", "group_norm", "layer_norm"):
        return Inside()
    source = call.attributes["input"]
    layout, whole = placed.placed.inputs[source], graph.shape(source)
    axes = sharing_axes(call, placed.placed, graph)
    if call.op == "batch_norm" and (batch_norm != "sync" or not graph.training):
        samples = layout.split(0)
        axes = tuple(axis for axis in axes if samples is None or axis not in samples.axes)
    others = mesh.size(axes) - 1
    if others == 0:
        return Inside()
    shape = layout.local_shape(whole, mesh, place)
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
