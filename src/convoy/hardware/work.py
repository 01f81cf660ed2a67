"""What a network asks of a device: for each of its calls the arithmetic, the bytes, and the shapes that matter."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from convoy.graph.graph import Call, Graph
from convoy.ops import OPERATIONS, capture

Shape = tuple[int, ...]
Array = npt.NDArray[np.float64]

# What calls are told apart by; views cost nothing and are none of them
KINDS = ("conv", "linear", "norm", "pool", "pointwise")

KIND_OF = {"conv": "conv", "linear": "linear", "batch_norm": "norm", "group_norm": "norm", "layer_norm": "norm"}
KIND_OF |= {"lrn": "norm", "rms_norm": "norm", "pool": "pool", "pooling": "pool", "adaptive_pool": "pool"}


@dataclass(frozen=True)
class Item:
    """A call on one device."""

    kind: str  # one of `KINDS`
    macs: float  # multiply-adds of the forward pass
    read: float  # elements of the inputs that are activations, and of the outputs
    written: float
    weights: float  # elements of the parameters
    window: float = 1.0  # elements of a filter's window, 1 for 1x1 and what is not a convolution
    depth: float = 1.0  # input channels of a group, over which each output is a sum
    width: float = 1.0  # output channels of a group
    groups: float = 1.0
    strided: bool = False  # windows are more than one pixel apart
    first: bool = False  # its input has no gradient


def item_of(call: Call, graph: Graph, shape: Callable[[str], Shape]) -> Item | None:
    """What a call does where its tensors have the shapes that `shape` gives; None where it does nothing."""
    operation = OPERATIONS[call.op]
    if operation.is_view:
        return None
    values = graph.values
    weights = float(sum(math.prod(shape(name)) for name in call.inputs if values[name].origin == "parameter"))
    inputs = [name for name in call.inputs if values[name].origin in ("call", "input")]
    read, written = (float(sum(math.prod(shape(name)) for name in names)) for names in (inputs, call.outputs))
    first = all(values[name].origin == "input" for name in inputs)
    kind = KIND_OF.get(call.op, "pool" if "pool" in call.op else "pointwise")
    if kind == "conv":
        weight, output = shape(call.attributes["weight"]), shape(call.outputs[0])
        groups, transposed = int(call.attributes["groups"]), bool(call.attributes["transposed"])
        places = shape(call.attributes["input"]) if transposed else output
        macs = places[0] * math.prod(places[2:]) * math.prod(weight)
        outer, inner = (weight[1], weight[0] // groups) if transposed else (weight[0] // groups, weight[1])
        strided = max(call.attributes["stride"]) > 1
        return Item(kind, macs, read, written, weights, math.prod(weight[2:]), inner, outer, groups, strided, first)
    if kind == "linear":
        weight, output = shape(call.attributes["weight"]), shape(call.outputs[0])
        return Item(kind, math.prod(output[:-1]) * math.prod(weight), read, written, weights, 1, weight[1], weight[0])
    return Item(kind, 0.0, read, written, weights, first=first)


@dataclass(frozen=True)
class Work:
    """All calls of a network for one image, equal ones together: columns of numbers."""

    kind: npt.NDArray[np.int64]  # of each row, by its place in `KINDS`
    count: Array  # calls that a row stands for
    macs: Array  # for one image and one call, like `read` and `written`
    read: Array
    written: Array
    weights: Array  # this and the columns below as in `Item`
    window: Array
    depth: Array
    width: Array
    groups: Array
    strided: Array
    first: Array
    parameters: float  # elements that are trained
    tensors: int  # number of parameters
    kept: float  # elements that the backward pass of one image needs
    image: float  # elements of an image

    @staticmethod
    def of(items: Iterable[Item], parameters: float, tensors: int, kept: float, image: float, images: float) -> "Work":
        """The work of calls over so many images."""
        counted: dict[Item, int] = {}
        for item in items:
            counted[item] = counted.get(item, 0) + 1
        rows = list(counted)

        def column(name: str, divisor: float = 1.0) -> Array:
            return np.array([float(getattr(row, name)) / divisor for row in rows])

        return Work(
            kind=np.array([KINDS.index(row.kind) for row in rows], dtype=np.int64),
            count=np.array([float(counted[row]) for row in rows]),
            macs=column("macs", images),
            read=column("read", images),
            written=column("written", images),
            **{name: column(name) for name in ("weights", "window", "depth", "width", "groups", "strided", "first")},
            parameters=parameters,
            tensors=tensors,
            kept=kept,
            image=image,
        )


def work_of_graph(graph: Graph) -> Work:
    """The work of a captured network."""
    images = graph.shape(graph.inputs[0])[0]
    items = [item for call in graph.calls if (item := item_of(call, graph, graph.shape)) is not None]
    parameters = list(graph.parameters())
    kept = sum(item.written for item in items) / images
    elements = float(sum(math.prod(value.shape) for value in parameters))
    image = math.prod(graph.shape(graph.inputs[0])) / images
    return Work.of(items, elements, len(parameters), kept, image, images)


def work_of(network: nn.Module, image: Sequence[int]) -> Work:
    """The work of a network on images of (channels, height, width); it may be on the meta device. A network that cannot
    be captured is a CaptureError."""
    return work_of_graph(capture(network, [torch.empty(2, *image, device="meta")], training=True))
