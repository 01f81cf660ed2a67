"""Layer norm of a rank's part of an activation."""

import math

import torch.nn.functional as F
from torch import Tensor

from convoy.engine.kernels.kernel import Alone, Kernel, Site
from convoy.engine.kernels.shared_statistics import Normalize, Sharing, affine


def build(site: Site) -> Kernel:
    """The function itself where the rank has whole vectors; otherwise statistics are shared with other ranks."""
    call = site.call
    attributes, names = call.attributes, call.inputs
    source, eps = attributes["input"], attributes["eps"]
    shape, layout = site.graph.shape(source), site.layouts[source]
    dims = range(len(shape) - len(attributes["normalized_shape"]), len(shape))
    local = [len(site.parts(source, dim)) for dim in dims]
    axes = tuple(sorted(axis for dim, split in layout.splits if dim in dims for axis in split.axes))
    group = site.groups.of(axes)

    def alone(*tensors: Tensor) -> list[Tensor]:
        found = dict(zip(names, tensors, strict=True))
        x, weight, bias = (found.get(attributes[key]) for key in ("input", "weight", "bias"))
        assert x is not None
        return [F.layer_norm(x, local, weight, bias, eps)]

    if group is None:
        return alone
    total = math.prod(shape[dim] for dim in dims)
    shares = tuple(
        (math.prod(len(layout.parts(dim, site.mesh, place, shape[dim])) for dim in dims) / total,)
        for place in site.mesh.group(site.coordinates, axes)
    )
    sharing = Sharing(group, (0,), shares, total)
    view, elements, first = tuple(local), math.prod(local), dims[0]

    def together(*tensors: Tensor) -> list[Tensor]:
        found = dict(zip(names, tensors, strict=True))
        x, weight, bias = (found.get(attributes[key]) for key in ("input", "weight", "bias"))
        assert x is not None
        rows = x.reshape(math.prod(x.shape[:first]), 1, elements)
        y = Normalize.apply(rows, sharing, eps).view(x.shape)
        return [affine(y, weight, bias, view)]

    return Alone(together)
