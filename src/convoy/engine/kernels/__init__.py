"""What a rank computes for each kind of call."""

from collections.abc import Callable

from convoy.engine.kernels import (
    as_called,
    batch_norm,
    convolution,
    dropout,
    group_norm,
    interpolate,
    layer_norm,
    linear,
    lrn,
    pad,
    pool,
    random,
    reduce,
    select,
    shape,
    softmax,
    split,
)
from convoy.engine.kernels.kernel import Alone, Kernel, Recorded, Site

KERNELS: dict[str, Callable[[Site], Kernel]] = {
    "adaptive_avg_pool": pool.build_adaptive,
    "adaptive_max_pool": pool.build_adaptive,
    "avg_pool": pool.build_avg,
    "batch_norm": batch_norm.build,
    "conv": convolution.build,
    "dropout": dropout.build,
    "group_norm": group_norm.build,
    "interpolate": interpolate.build,
    "layer_norm": layer_norm.build,
    "linear": linear.build,
    "lrn": lrn.build,
    "max_pool": pool.build_max,
    "pad": pad.build,
    "permute": shape.build_permute,
    "random": random.build,
    "reduce": reduce.build,
    "reshape": shape.build_reshape,
    "select": select.build,
    "softmax": softmax.build,
    "split": split.build,
}


def build_kernel(site: Site) -> Kernel:
    """The rank's version of a call; a call without one of its own does on its part what it does on the whole."""
    return KERNELS.get(site.call.op, as_called.build)(site)


__all__ = ["KERNELS", "Alone", "Kernel", "Recorded", "Site", "build_kernel"]
