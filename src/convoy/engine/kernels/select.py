"""A rank's part of basic indexing."""

from collections.abc import Callable

from torch import Tensor

from convoy.engine.kernels.kernel import Kernel, Site
from convoy.engine.kernels.slices import taking
from convoy.plans.layout import Indices
from convoy.plans.rules.select import places


def build(site: Site) -> Kernel:
    """Of each dimension the rank's own indices that are in the slice."""
    call = site.call
    source, ranges = call.attributes["input"], call.attributes["ranges"]
    steps = [_step(dim, one, site.parts(source, dim)) for dim, one in enumerate(ranges)]

    def kernel(x: Tensor) -> list[Tensor]:
        for step in reversed(steps):
            x = step(x)
        return [x]

    return kernel


def _step(dim: int, chosen: int | tuple[int, int, int], part: Indices) -> Callable[[Tensor], Tensor]:
    if isinstance(chosen, int):
        return lambda x: x.select(dim, chosen)
    return taking(dim, places(part, range(*chosen)), len(part))
