"""A rank's part of padding."""

import torch.nn.functional as F
from torch import Tensor

from convoy.engine.kernels import as_called
from convoy.engine.kernels.kernel import Kernel, Site
from convoy.engine.kernels.slices import taking
from convoy.plans.rules.pad import ends, remaining


def build(site: Site) -> Kernel:
    """The ranks that hold the ends of a divided dimension pad it there."""
    call = site.call
    source, pads = call.attributes["input"], call.attributes["pads"]
    shape = site.graph.shape(source)
    if not any(any(pads[dim]) for dim, _ in site.layouts[source].splits):
        return as_called.build(site)
    parts = [site.parts(source, dim) for dim in range(len(shape))]
    crops = [taking(dim, remaining(part, shape[dim], *pads[dim]), len(part)) for dim, part in enumerate(parts)]
    added = [ends(part, shape[dim], *pads[dim]) for dim, part in enumerate(parts)]
    flat = tuple(size for pair in reversed(added) for size in pair)
    value = call.attributes["value"] or 0.0

    def kernel(x: Tensor) -> list[Tensor]:
        for crop in crops:
            x = crop(x)
        return [F.pad(x, flat, value=value) if any(flat) else x]

    return kernel
