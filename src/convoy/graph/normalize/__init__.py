"""What kind of work a call is, in the words that the rules use."""

from convoy.graph.normalize import (
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
from convoy.graph.normalize.seen import Normal, Normalizer, Seen

__all__ = ["OPS", "Normal", "Seen", "normalize"]

OPS = (
    *("conv", "linear", "matmul", "batch_norm", "group_norm", "layer_norm", "lrn", "max_pool", "avg_pool"),
    *("adaptive_avg_pool", "adaptive_max_pool", "dropout", "random", "elementwise", "identity", "cat", "reshape"),
    *("permute", "split", "select", "reduce", "softmax", "interpolate", "pad", "opaque"),
)
"""Every `Call.op` there is."""

_NORMALIZERS: dict[str, Normalizer] = {
    **convolution.NORMALIZERS,
    **elementwise.NORMALIZERS,
    **independent.NORMALIZERS,
    **indexing.NORMALIZERS,
    **joining.NORMALIZERS,
    **norms.NORMALIZERS,
    **pooling.NORMALIZERS,
    **reduction.NORMALIZERS,
    **resizing.NORMALIZERS,
    **shape.NORMALIZERS,
}


def normalize(seen: Seen) -> Normal:
    """The op and the attributes of a call; `opaque` where no family knows it.

    An opaque call may have the attribute `independent`: dimensions, of all its inputs and outputs alike, along which
    the same function with the same arguments gives each piece of the outputs for the same piece of the inputs.
    """
    normalizer = _NORMALIZERS.get(seen.name)
    return (normalizer(seen) if normalizer else None) or Normal("opaque")
