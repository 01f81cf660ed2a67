"""Group norm of a rank's part of an activation."""

import math
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.engine.kernels.kernel import Alone, Kernel, Site
from convoy.engine.kernels.shared_statistics import Normalize, Sharing, affine
from convoy.plans.layout import Indices
from convoy.plans.mesh import Axes


def build(site: Site) -> Kernel:
    """The function itself where the rank has whole groups; otherwise statistics are shared with other ranks."""
    call = site.call
    attributes, names = call.attributes, call.inputs
    source, eps = attributes["input"], attributes["eps"]
    layout, size = site.layouts[source], site.graph.shape(source)[1] // attributes["num_groups"]
    view = (-1, *[1] * (len(site.graph.shape(source)) - 2))
    num_groups = len(site.parts(source, 1)) // size
    split = layout.split(1)
    aligned = split is None or all(whole_groups(part, size) for part in split.parts)
    shared = {axis for dim, split in layout.splits for axis in split.axes if dim > 1 or (dim == 1 and not aligned)}
    axes = tuple(sorted(shared))
    group = site.groups.of(axes)

    def alone(*tensors: Tensor) -> list[Tensor]:
        found = dict(zip(names, tensors, strict=True))
        x, weight, bias = (found.get(attributes[key]) for key in ("input", "weight", "bias"))
        assert x is not None
        if x.numel() == 0:
            return [affine(x.clone(), weight, bias, view)]
        return [F.group_norm(x, num_groups, weight, bias, eps)]

    if group is None:
        return alone
    membership, shares = _shares(site, source, axes, size)
    sharing = Sharing(group, membership, shares, size * math.prod(site.graph.shape(source)[2:]))

    def together(*tensors: Tensor) -> list[Tensor]:
        found = dict(zip(names, tensors, strict=True))
        x, weight, bias = (found.get(attributes[key]) for key in ("input", "weight", "bias"))
        assert x is not None
        rows: Tensor = Normalize.apply(_rows(x), sharing, eps)
        y = _from_rows(rows, x)
        return [affine(y, weight, bias, view)]

    return Alone(together)


def whole_groups(part: Indices, size: int) -> bool:
    """Whether channels are whole groups of consecutive channels, one after the other."""
    starts = part[::size]
    runs = (part[place : place + size] for place in range(0, len(part), size))
    return all(
        start % size == 0 and tuple(run) == tuple(range(start, start + size))
        for start, run in zip(starts, runs, strict=True)
    )


def _shares(site: Site, source: str, axes: Axes, size: int) -> tuple[tuple[int, ...], tuple[tuple[float, ...], ...]]:
    """The group of each own channel, among those that this rank and its partners have; each partner's shares."""
    shape, layout = site.graph.shape(source), site.layouts[source]
    parts = [
        [layout.parts(dim, site.mesh, place, shape[dim]) for dim in range(1, len(shape))]
        for place in site.mesh.group(site.coordinates, axes)
    ]
    numbers = sorted({channel // size for channels, *_ in parts for channel in channels})
    total = size * math.prod(shape[2:])
    shares = []
    for channels, *rest in parts:
        counts = Counter(channel // size for channel in channels)
        elements = math.prod(map(len, rest))
        shares.append(tuple(counts[number] * elements / total for number in numbers))
    membership = tuple(numbers.index(channel // size) for channel in site.parts(source, 1))
    return membership, tuple(shares)


def _rows(x: Tensor) -> Tensor:
    """As [samples, channels, elements], without a copy."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1).flatten(1, 2).transpose(1, 2)
    return x.flatten(2) if x.dim() > 2 else x[..., None]


def _from_rows(y: Tensor, x: Tensor) -> Tensor:
    """Back in the shape and memory format of `x`."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        y = y.transpose(1, 2).unflatten(1, x.shape[2:])
        return y.permute(0, 3, 1, 2)
    return y.view(x.shape)
