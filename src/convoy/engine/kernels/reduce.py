"""A rank's part of a sum, a mean or a maximum over dimensions."""

import math

from torch import Tensor

from convoy.engine.kernels import as_called
from convoy.engine.kernels.kernel import Kernel, Site
from convoy.plans.rules.reduce import reduced_dims


def build(site: Site) -> Kernel:
    """A mean over a divided dimension is the sum of the rank's part, divided by the number of all elements."""
    call = site.call
    source, function = call.attributes["input"], call.attributes["function"]
    shape = site.graph.shape(source)
    dims = sorted(reduced_dims(call.attributes["dims"], len(shape)))
    if not any(dim in dims for dim, _ in site.layouts[source].splits):
        return as_called.build(site)
    assert function in ("mean", "sum"), function
    keepdim, dtype = call.attributes["keepdim"], call.kwargs.get("dtype")
    count = math.prod(shape[dim] for dim in dims)

    def kernel(x: Tensor) -> list[Tensor]:
        total = x.sum(dims, keepdim=keepdim, dtype=dtype)
        return [total if function == "sum" else (total / count).to(dtype or x.dtype)]

    return kernel
