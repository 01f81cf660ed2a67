"""Dropout of a rank's part of an activation."""

import torch
from torch import Tensor

from convoy.engine.dropout import drop
from convoy.engine.kernels.kernel import Alone, Kernel, Site
from convoy.engine.random import layer_key, random_bits
from convoy.plans.layout import Indices


def build(site: Site) -> Kernel:
    """Draws the mask of just the elements that the rank holds; it is the whole mask's part."""
    call, context = site.call, site.context
    context.need_keys()
    source, p = call.attributes["input"], call.attributes["p"]
    shape = site.graph.shape(source)
    dims = range(1, 2) if call.attributes["channels"] else range(1, len(shape))
    samples, key = site.parts(source, 0), layer_key(call.name)
    elements = positions([site.parts(source, dim) for dim in dims], [shape[dim] for dim in dims])
    local = site.local_shape(source)
    view = [local[dim] if dim == 0 or dim in dims else 1 for dim in range(len(shape))]

    def kernel(x: Tensor) -> list[Tensor]:
        nonlocal elements
        elements = elements.to(x.device)
        keys = context.keys_of(samples, shape[0])
        return [drop(x, random_bits(keys, key, elements).view(view), p)]

    return Alone(kernel)


def positions(parts: list[Indices], sizes: list[int]) -> Tensor:
    """Where the elements at `parts` of each dimension are in a tensor of `sizes`: int32 [elements]."""
    found = torch.zeros(1, dtype=torch.int32)
    for part, size in zip(parts, sizes, strict=True):
        inner = torch.tensor(part, dtype=torch.int32)
        found = (found[:, None] * size + inner).flatten()
    return found
