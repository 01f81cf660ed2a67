"""Batch norm of all microbatches at once by torch's operations: the four functions of `batch_norm_kernels.py`, where
Triton is not installed, for ranks without samples, and for what `torch.compile` traces, which fuses them with what
follows."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from convoy.ops.statistics import Running, follow_at_once, joined


class Norm(NamedTuple):
    """A layer and what follows it at once: (x − mean) / √(variance + eps) · weight + bias + residual, then a ReLU. Of
    ResNet-50's 49 ReLUs 33 follow a batch norm, each a pass over the activation each way; their sign is computed again
    from `x`, which is kept anyway."""

    weight: Tensor | None  # [channels]
    bias: Tensor | None  # [channels]
    residual: Tensor | None  # of the result's shape
    eps: float
    relu: bool


class Saved(NamedTuple):
    """What the backward pass of a `Norm` needs."""

    x: Tensor
    y: Tensor | None  # the result, where it is a ReLU's of a sum: the gradient behind that is then wanted, too
    weight: Tensor | None
    bias: Tensor | None
    statistics: Tensor  # mean and 1 / √(variance + eps), [microbatches, 2, channels]
    sizes: Sequence[int]
    relu: bool  # whether the ReLU's sign is to be computed again from `x`


def ended(y: Tensor, norm: Norm) -> Tensor:
    """The result after its residual and ReLU, written over it."""
    if norm.residual is not None:
        y = y.add_(norm.residual) if fits(norm.residual, y) and y.is_floating_point() else y + norm.residual
    return y.relu_() if norm.relu else y


def fits(residual: Tensor | None, x: Tensor) -> bool:
    """Whether the kernels of `x` can add a residual."""
    return residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)


def moments(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Count, mean and sum of squared deviations of every microbatch: [microbatches, 3, channels]."""
    if x.numel() == 0:
        return x.new_zeros(len(sizes), 3, x.shape[1], dtype=_wide_type(x))
    rows = []
    for (part,) in _by_run(sizes, x):
        dims, count = [1, *range(3, part.dim())], part.shape[1] * math.prod(part.shape[3:])
        var, mean = torch.var_mean(part.to(_wide_type(x)), dims, correction=0)
        rows.append(torch.stack([torch.full_like(mean, count), mean, var * count], 1))
    return joined(rows)


def normalize(
    x: Tensor, moments: Tensor, norm: Norm, running: Running | None, sizes: Sequence[int], wants_terms: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The result from the moments of every microbatch, or of the parts of one on several ranks, of which this one's,
    `x`, may be empty; mean and 1 / √(variance + eps), and, if wanted, mean and unbiased variance, [microbatches, 2,
    channels] each. The running statistics of a single microbatch are updated."""
    counts, means, squares = (combined(moments) if len(sizes) == 1 < len(moments) else moments).unbind(1)
    statistics = torch.stack([means, (squares / counts + norm.eps).rsqrt()], 1)
    terms = torch.stack([means, squares / (counts - 1).clamp(min=1)], 1)
    if running is not None:
        follow_at_once(running, terms)
    results = []
    for part, numbers in _by_run(sizes, x, statistics=statistics) if x.numel() else ():
        mean, inverse = numbers.unbind(1)
        y = _normalized(part, mean, inverse, norm.weight, norm.bias)
        results.append(y.to(x.dtype).flatten(0, 1))
    return ended(joined(results) if results else torch.empty_like(x), norm), statistics, terms


def combined(moments: Tensor) -> Tensor:
    """The moments of one microbatch from those of its parts (Chan, Golub and LeVeque, 1979): [1, 3, channels]."""
    counts, means, squares = moments.unbind(1)
    total = counts.sum(0)
    mean = (means * counts).sum(0) / total
    return torch.stack([total, mean, (squares + (means - mean).square() * counts).sum(0)])[None]


def gradient_sums(gradient: Tensor, saved: Saved, copies: bool = False) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sums of dy and of dy · x̂ over every microbatch, [microbatches, 2, channels], their copy if wanted, and the
    gradient behind the ReLU where its result is given."""
    x, y, weight, bias, statistics, sizes, relu = saved
    masked = None if y is None else gradient.masked_fill(y <= 0, 0)
    dy = gradient if masked is None else masked
    sums = []
    for part_dy, part, numbers in _by_run(sizes, dy, x, statistics=statistics):
        mean, inverse = numbers.unbind(1)
        wide = _behind_relu(part_dy, part, mean, inverse, weight, bias) if relu else part_dy.to(mean.dtype)
        dims = [1, *range(3, part.dim())]
        slope = (wide * _normalized(part, mean, inverse, None, None)).sum(dims)
        sums.append(torch.stack([wide.sum(dims), slope], 1))
    total_sums = joined(sums)
    return total_sums, total_sums.clone() if copies else None, masked


def input_gradient(gradient: Tensor, saved: Saved, sums: Tensor, total: int | None) -> Tensor:
    """dx from the sums over `total` numbers of each channel, by default those of the microbatch."""
    x, _, weight, bias, statistics, sizes, relu = saved
    results, begin = [], 0
    for dy, part, numbers in _by_run(sizes, gradient, x, statistics=statistics) if x.numel() else ():
        mean, inverse = numbers.unbind(1)
        means = sums[begin : begin + len(part)] / (total or part.shape[1] * math.prod(part.shape[3:]))
        shift, slope = means.unbind(1)
        dy = _behind_relu(dy, part, mean, inverse, weight, bias) if relu else dy.to(mean.dtype)
        deviation = _normalized(part, mean, inverse, None, None)
        dx = dy - torch.addcmul(_over(shift, part), deviation, _over(slope, part))
        scale = inverse if weight is None else inverse * weight
        results.append((dx * _over(scale, part)).to(x.dtype).flatten(0, 1))
        begin += len(part)
    return joined(results) if results else torch.empty_like(x)


def _wide_type(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _by_run(sizes: Sequence[int], *tensors: Tensor, statistics: Tensor | None = None) -> list[tuple[Tensor, ...]]:
    """The runs of microbatches of one size, [microbatches, samples, ...], of tensors [samples, ...], with the rows of
    `statistics`, [microbatches, ...], that belong to them."""
    runs = [(len(list(run)), size) for size, run in itertools.groupby(sizes)]
    columns = []
    for x in tensors:
        parts = [x] if len(runs) == 1 else x.split([number * size for number, size in runs])
        columns.append([part.unflatten(0, run) for part, run in zip(parts, runs, strict=True)])
    if statistics is not None:
        columns.append(list(statistics.split([number for number, _ in runs])))
    return list(zip(*columns, strict=True))


def _normalized(x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """(x − mean) · inverse · weight + bias in the wide type, of `x` [microbatches, samples, channels, ...], `mean` and
    `inverse` [microbatches, channels], and `weight` and `bias` [channels] or None."""
    scale = inverse if weight is None else inverse * weight
    y = (x - _over(mean, x)) * _over(scale, x)
    return y if bias is None else y + _over(bias[None], x)


def _behind_relu(gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, *affine: Tensor | None) -> Tensor:
    return gradient.to(mean.dtype).masked_fill(_normalized(x, mean, inverse, *affine) <= 0, 0)


def _over(numbers: Tensor, x: Tensor) -> Tensor:
    """[microbatches or 1, channels] as it broadcasts to [microbatches, samples, channels, ...]."""
    return numbers.view(len(numbers), 1, -1, *[1] * (x.dim() - 3))
