"""What kind of work a call is, in the words that the rules use."""

from convoy.graph.normalise import (
    convolution,
    elementwise,
    independent,
    indexing,
    joining,
    norms,
    pooling,
    reduction,
    resizing,
    shape,
)
from convoy.graph.normalise.seen import Normal, Normaliser, Seen

__all__ = ["OPS", "Normal", "Seen", "normalise"]

OPS = (
    *("conv", "linear", "matmul", "batch_norm", "group_norm", "layer_norm", "lrn", "max_pool", "avg_pool"),
    *("adaptive_avg_pool", "adaptive_max_pool", "dropout", "random", "elementwise", "identity", "cat", "reshape"),
    *("permute", "split", "select", "reduce", "softmax", "interpolate", "pad", "opaque"),
)
"""Every `Call.op` there is."""

_NORMALISERS: dict[str, Normaliser] = {
    **convolution.NORMALISERS,
    **elementwise.NORMALISERS,
    **independent.NORMALISERS,
    **indexing.NORMALISERS,
    **joining.NORMALISERS,
    **norms.NORMALISERS,
    **pooling.NORMALISERS,
    **reduction.NORMALISERS,
    **resizing.NORMALISERS,
    **shape.NORMALISERS,
}


def normalise(seen: Seen) -> Normal:
    """The op and the attributes of a call; `opaque` where no family knows it.

    An opaque call may have the attribute `independent`: dimensions, of all its inputs and outputs alike, along which
    the same function with the same arguments gives each piece of the outputs for the same piece of the inputs.
    """
    normaliser = _NORMALISERS.get(seen.name)
    return (normaliser(seen) if normaliser else None) or Normal("opaque")
