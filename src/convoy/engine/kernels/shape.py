"""Reshape and permute of a rank's part."""

from torch import Tensor

from convoy.engine.kernels.kernel import Kernel, Site


def build_reshape(site: Site) -> Kernel:
    """To the rank's own shape of the result."""
    shape = site.local_shape(site.call.outputs[0])
    return lambda x: [x.reshape(shape)]


def build_permute(site: Site) -> Kernel:
    """In the call's order."""
    order = tuple(site.call.attributes["order"])

    def kernel(x: Tensor) -> list[Tensor]:
        return [x.permute(order)]

    return kernel
