"""A rank's part of basic indexing."""

from torch import Tensor

from convoy.engine.kernels.kernel import Kernel, Site
from convoy.engine.kernels.slices import take
from convoy.plans.rules.select import places


def build(site: Site) -> Kernel:
    """Of each dimension the rank's own indices that are in the slice."""
    call = site.call
    source, ranges = call.attributes["input"], call.attributes["ranges"]
    chosen = [
        one if isinstance(one, int) else places(site.parts(source, dim), range(*one)) for dim, one in enumerate(ranges)
    ]

    def kernel(x: Tensor) -> list[Tensor]:
        for dim, one in reversed(list(enumerate(chosen))):
            x = x.select(dim, one) if isinstance(one, int) else take(x, dim, one)
        return [x]

    return kernel
