"""What a network asks of a device: for each of its calls the arithmetic, the bytes, and the shapes that matter."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
