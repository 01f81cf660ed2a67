"""A rank's part of the resizing of pictures."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.engine.kernels import as_called
from convoy.engine.kernels.empty import nothing
from convoy.engine.kernels.kernel import Kernel, Site
from convoy.engine.kernels.slices import picking
from convoy.plans.rules.interpolate import repeats, weights_of
from convoy.plans.rules.spatial import spatial


def build(site: Site) -> Kernel:
    """Divided dimensions by their matrix of weights, one after another; the others by torch's function."""
    call = site.call
    output = call.outputs[0]
    shape = site.local_shape(output)
    if not math.prod(shape):
        return lambda x: [nothing(x, shape)]
    dims = spatial(len(shape), len(call.attributes["output_size"]))
    divided = [dim for dim in dims if site.layouts[output].split(dim) is not None]
    if not divided:
        return as_called.build(site)
    if all(_repeats(site, dim) for dim in dims):
        size = tuple(shape[dim] for dim in dims)
        return lambda x: [F.interpolate(x, size, mode=call.attributes["mode"])]
    resized = [_along(site, dim) for dim in divided]
    options = None if len(divided) == len(dims) else _options(site, dims, divided)

    def kernel(x: Tensor) -> list[Tensor]:
        for resize in resized:
            x = resize(x)
        return [x if options is None else F.interpolate(x, **options)]

    return kernel


def _repeats(site: Site, dim: int) -> bool:
    """Whether the rank's output is each of its own rows, repeated."""
    source, output = site.call.attributes["input"], site.call.outputs[0]
    size, output_size = site.graph.shape(source)[dim], site.graph.shape(output)[dim]
    if not repeats(site.call, size, output_size):
        return False
    factor = output_size // size
    repeated = [row * factor + again for row in site.parts(source, dim) for again in range(factor)]
    return repeated == list(site.parts(output, dim))


def _along(site: Site, dim: int) -> Callable[[Tensor], Tensor]:
    """Resizes the rank's rows of one dimension."""
    rows, output = site.parts(site.call.attributes["input"], dim), site.parts(site.call.outputs[0], dim)
    weights = weights_of(site.graph, site.call, dim)[torch.tensor(rows)][:, torch.tensor(output)]
    if "nearest" in site.call.attributes["mode"]:
        return picking(dim, weights.argmax(0))

    def resize(x: Tensor) -> Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            y = x.movedim(dim, -1).to(dtype) @ weights.to(x.device, dtype)
        return y.movedim(-1, dim).to(x.dtype)

    return resize


def _options(site: Site, dims: range, divided: list[int]) -> dict[str, Any]:
    """For the dimensions that are whole; the others already have their size, which torch then leaves as it is."""
    attributes = site.call.attributes
    options: dict[str, Any] = {"mode": attributes["mode"], "align_corners": attributes["align_corners"]}
    scales = attributes["scale"]
    if scales is None:
        options["size"] = tuple(site.local_shape(site.call.outputs[0])[dim] for dim in dims)
    else:
        options["scale_factor"] = tuple(
            1.0 if dim in divided else float(scale) for dim, scale in zip(dims, scales, strict=True)
        )
    return options
