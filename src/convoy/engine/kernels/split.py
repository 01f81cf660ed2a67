"""A rank's part of the chunks of a tensor."""

from torch import Tensor

from convoy.engine.kernels.kernel import Kernel, Site
from convoy.engine.kernels.slices import taking
from convoy.plans.layout import consecutive
from convoy.plans.rules.select import places


def build(site: Site) -> Kernel:
    """Of each chunk the rank's own indices."""
    attributes = site.call.attributes
    source = attributes["input"]
    dim = attributes["dim"] % len(site.graph.shape(source))
    part = site.parts(source, dim)
    chunks = [taking(dim, places(part, chunk), len(part)) for chunk in consecutive(attributes["sizes"])]

    def kernel(x: Tensor) -> list[Tensor]:
        return [chunk(x) for chunk in chunks]

    return kernel
