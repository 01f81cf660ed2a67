"""What a rank computes for each kind of call."""

from collections.abc import Callable

from convoy.engine.kernels import as_called, convolution, linear, shape
from convoy.engine.kernels.kernel import Kernel, Site

KERNELS: dict[str, Callable[[Site], Kernel]] = {
    "conv": convolution.build,
    "linear": linear.build,
    "permute": shape.build_permute,
    "reshape": shape.build_reshape,
}


def build_kernel(site: Site) -> Kernel:
    """The rank's version of a call; a call without one of its own does on its part what it does on the whole."""
    return KERNELS.get(site.call.op, as_called.build)(site)


__all__ = ["KERNELS", "Kernel", "Site", "build_kernel"]
