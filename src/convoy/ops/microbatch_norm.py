"""Batch norm of several microbatches in one go, each by its own mean and variance.

On the CPU one microbatch follows the other, which keeps each in the caches. On a GPU that would be a launch of every
kernel for each of them, so there all run at once: by Triton where it is installed, as it is beside torch for CUDA on
Linux, otherwise by a few of torch's own operations. What `torch.compile` traces are these operations, so that it can
fuse them with what follows.
"""

import itertools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from convoy.ops.gpu import is_watched, triton_kernels
from convoy.ops.statistics import Following


def normalize_by_itself(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Normalize a microbatch [samples, channels, ...] by its own mean and variance; also its term of the running
    statistics: mean and unbiased variance, [2, channels]."""
    term = new_term(x, weight)
    y = F.batch_norm(x, term[0], term[1], weight, bias, training=True, momentum=1.0, eps=eps)
    return y, term


def new_term(x: Tensor, weight: Tensor | None) -> Tensor:
    """Zeros that batch norm fills in as running statistics of which only the next term counts."""
    return torch.zeros(2, x.shape[1], dtype=(x if weight is None else weight).dtype, device=x.device)


def at_once(x: Tensor) -> bool:
    """Whether several microbatches are faster in one go than one after the other."""
    return x.device.type == "cuda"


def normalize_at_once(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    sizes: Sequence[int],
    running: Following | None = None,
    relu: bool = False,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalize every microbatch of `x`, [samples, channels, ...], by its own mean and variance; `residual`, of the
    shape of `x`, is added before the ReLU that may follow. The second result is the terms of the running statistics:
    mean and unbiased variance, [microbatches, 2, channels], in float32 at least.

    The terms update `running`, in order, unless it is None, where that comes later. A microbatch with one value of each
    channel has no variance and is refused with torch's ValueError.
    """
    if min(sizes) * math.prod(x.shape[2:]) < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
    is_eager = not torch.compiler.is_compiling()
    updated_now = running if is_eager and len(sizes) == 1 else None
    is_fused = is_eager and fits(residual, x)
    if is_eager:
        fused = (residual, relu) if is_fused else (None, False)
        y, terms = _AtOnce.apply(x, weight, bias, fused[0], eps, tuple(sizes), updated_now, fused[1])
    else:
        y, mean, var, _ = _normalized(x, weight, bias, eps, sizes)
        terms = torch.stack([mean, var * _corrections(x, sizes)], 1).detach()
    if running is not None and updated_now is None:
        follow(running.mean, running.var, running.count, running.momentum, terms)
    return y if is_fused else ended(y, residual, relu), terms


def fits(residual: Tensor | None, x: Tensor) -> bool:
    """Whether the kernels of `x` can add a residual."""
    return residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)


def ended(y: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """The result after its residual and ReLU, written over it."""
    if residual is not None:
        y = y.add_(residual) if fits(residual, y) and y.is_floating_point() else y + residual
    return y.relu_() if relu else y


class _AtOnce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        eps: float,
        sizes: tuple[int, ...],
        running: Following | None,
        relu: bool,
    ) -> tuple[Tensor, Tensor]:
        x = arranged(x)
        arranged_residual = None if residual is None else arranged_as(x, residual)
        buffers: tuple[Any, ...] = (None, None, None, None)
        if running is not None:
            buffers = running.mean, running.var, running.count, running.momentum
        run: Any = torch.ops.convoy.normalize_microbatches if is_watched(x) else _forward
        y, statistics, terms = run(x, weight, bias, arranged_residual, *buffers, sizes, eps, relu)
        ctx.save_for_backward(x, y if relu and arranged_residual is not None else None, weight, bias, statistics)
        ctx.sizes, ctx.relu = sizes, relu
        ctx.mark_non_differentiable(terms)
        ctx.set_materialize_grads(False)  # that of the terms would be zeros
        return y, terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, _: None) -> Any:
        if gradient is None:
            return (None,) * 8
        x, y, weight, bias, statistics = ctx.saved_tensors
        run = torch.ops.convoy.normalize_microbatches_backward if is_watched(gradient) else _backward
        dx, slope, shift, masked = run(arranged_as(x, gradient), x, y, weight, bias, statistics, ctx.sizes, ctx.relu)
        needed = ctx.needs_input_grad
        of_residual = (gradient if y is None else masked) if needed[3] else None
        return dx, slope if needed[1] else None, shift if needed[2] else None, of_residual, None, None, None, None


def arranged(x: Tensor) -> Tensor:
    """`x` with the channels either innermost in memory or right outside of rows and columns."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    is_arranged = x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])
    return x if is_arranged else x.contiguous()


def arranged_as(x: Tensor, gradient: Tensor) -> Tensor:
    """A gradient in the order of memory of `x`."""
    return gradient if gradient.stride() == x.stride() else torch.empty_like(x, dtype=gradient.dtype).copy_(gradient)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which numbers of a type are added up on a GPU."""
    return torch.promote_types(dtype, torch.float32)


torch.library.define(
    "convoy::normalize_microbatches",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "Tensor? count, float? momentum, int[] sizes, float eps, bool relu) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "convoy::normalize_microbatches_backward",
    "(Tensor gradient, Tensor x, Tensor? y, Tensor? weight, Tensor? bias, Tensor statistics, int[] sizes, bool relu) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    count: Tensor | None,
    momentum: float | None,
    sizes: Sequence[int],
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result; mean and 1 / √(variance + eps), and mean and unbiased variance: [microbatches, 2, channels] each."""
    kernels, buffers = batch_norm_kernels(x), (running_mean, running_var, count, momentum)
    if kernels is not None:
        result: tuple[Tensor, Tensor, Tensor] = kernels.normalize(
            x, kernels.moments(x, sizes), weight, bias, residual, *buffers, sizes, eps, relu
        )
        return result
    y, mean, var, inverse = _normalized(x, weight, bias, eps, sizes)
    terms = torch.stack([mean, var * _corrections(x, sizes)], 1)
    if running_mean is not None and running_var is not None:
        follow(running_mean, running_var, count, momentum, terms)
    return ended(y, residual, relu), torch.stack([mean, inverse], 1), terms


def _backward(
    gradient: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    sizes: Sequence[int],
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx = weight / √(variance + eps) · (dy − mean(dy) − x̂ · mean(dy · x̂)); the gradients of weight and bias; that
    behind the ReLU, or nothing where its result `y` is not given."""
    kernels, numbers = batch_norm_kernels(x), (x, weight, bias, statistics)
    if kernels is not None:
        sums, *_, masked = kernels.gradient_sums(gradient, x, y, *numbers[1:], sizes, relu)
        dy = gradient if masked is None else masked
        dx, shift, slope = kernels.input_gradient(dy, *numbers, sums, sizes, None, relu and y is None, True)
    else:
        masked = None if y is None else gradient.masked_fill(y <= 0, 0)
        dx, sums = _by_torch(gradient if masked is None else masked, *numbers, sizes, relu and y is None)
        shift, slope = (total.clone() for total in sums.sum(0).unbind(0))  # results must not share memory
    return dx, slope, shift, gradient.new_empty(0) if masked is None else masked


def _by_torch(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    sizes: Sequence[int],
    relu: bool,
) -> tuple[Tensor, Tensor]:
    results, sums = [], []
    runs = [number for number, _ in _runs(sizes)]
    for dy, part, numbers in zip(_by_run(gradient, sizes), _by_run(x, sizes), statistics.split(runs), strict=True):
        arguments = dy, part, weight, bias, numbers
        sums.append(gradient_sums(*arguments, relu))
        count = part.shape[1] * math.prod(part.shape[3:])
        results.append(input_gradient(*arguments, sums[-1] / count, relu).flatten(0, 1))
    return (results[0], sums[0]) if len(results) == 1 else (torch.cat(results), torch.cat(sums))


def _fake_forward(x: Tensor, weight: Any, bias: Any, residual: Any, *rest: Any) -> Any:
    shape = len(rest[4]), 2, x.shape[1]
    return torch.empty_like(x), *(x.new_empty(shape, dtype=wide_type(x.dtype)) for _ in range(2))


def _fake_backward(gradient: Tensor, x: Tensor, y: Any, weight: Any, bias: Any, statistics: Tensor, *_: Any) -> Any:
    numbers = (statistics.new_empty(x.shape[1]) for _ in range(2))
    return torch.empty_like(x), *numbers, gradient.new_empty(0) if y is None else torch.empty_like(gradient)


torch.library.impl("convoy::normalize_microbatches", "default", _forward)
torch.library.impl("convoy::normalize_microbatches_backward", "default", _backward)
torch.library.register_fake("convoy::normalize_microbatches", _fake_forward)
torch.library.register_fake("convoy::normalize_microbatches_backward", _fake_backward)


def batch_norm_kernels(x: Tensor) -> ModuleType | None:
    """The kernels of Triton, where they run."""
    return triton_kernels("microbatch_kernels", "batch norm", x)


def _runs(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Number and size of microbatches of one size that follow each other."""
    return [(len(list(run)), size) for size, run in itertools.groupby(sizes)]


def _by_run(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """[samples, ...] as [microbatches, samples, ...] for each run."""
    runs = _runs(sizes)
    parts = [x] if len(runs) == 1 else x.split([number * size for number, size in runs])
    return [part.unflatten(0, run) for part, run in zip(parts, runs, strict=True)]


def _corrections(x: Tensor, sizes: Sequence[int]) -> Any:
    """The factors that make variances unbiased: for each microbatch, or for all."""
    numbers = [(number, size * math.prod(x.shape[2:])) for number, size in _runs(sizes)]
    if len(numbers) == 1:
        return numbers[0][1] / (numbers[0][1] - 1)
    parts = [
        torch.full((number, 1), size / (size - 1), dtype=wide_type(x.dtype), device=x.device)
        for number, size in numbers
    ]
    return torch.cat(parts)


def _normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, sizes: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result; mean, biased variance and 1 / √(variance + eps), [microbatches, channels] each."""
    dims = [1, *range(3, x.dim() + 1)]
    results, statistics = [], []
    for part in _by_run(x, sizes):
        wide_part = part.to(wide_type(x.dtype))
        var, mean = (statistic.flatten(1) for statistic in torch.var_mean(wide_part, dims, correction=0, keepdim=True))
        inverse = (var + eps).rsqrt()
        results.append(normalized(wide_part, mean, inverse, weight, bias).to(x.dtype).flatten(0, 1))
        statistics.append((mean, var, inverse))
    if len(results) == 1:
        return results[0], *statistics[0]
    mean, var, inverse = (torch.cat(tensors) for tensors in zip(*statistics, strict=True))
    return torch.cat(results), mean, var, inverse


def normalized(x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """(x − mean) · inverse · weight + bias in the wide type, of `x` [microbatches, samples, channels, ...], `mean` and
    `inverse` [microbatches, channels], and `weight` and `bias` [channels] or None."""
    scale = inverse if weight is None else inverse * weight
    y = (x - _over(mean, x)) * _over(scale, x)
    return y if bias is None else y + _over(bias[None], x)


def gradient_sums(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    relu: bool,
) -> Tensor:
    """The sums of dy and of dy · x̂ over each microbatch: [microbatches, 2, channels]. `statistics` are mean and 1 /
    √(variance + eps), [microbatches, 2, channels], the other tensors as in `normalized`; with `relu` the gradient is
    that of the ReLU that follows."""
    mean, inverse = statistics.unbind(1)
    dy = _behind_relu(gradient, x, mean, inverse, weight, bias) if relu else gradient.to(mean.dtype)
    dims = [1, *range(3, x.dim())]
    return torch.stack([dy.sum(dims), (dy * normalized(x, mean, inverse, None, None)).sum(dims)], 1)


def input_gradient(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    means: Tensor,
    relu: bool,
) -> Tensor:
    """dx = weight / √(variance + eps) · (dy − mean(dy) − x̂ · mean(dy · x̂)). `means` are the two in this formula,
    [microbatches, 2, channels]; the other arguments are those of `gradient_sums`."""
    mean, inverse = statistics.unbind(1)
    shift, slope = means.unbind(1)
    dy = _behind_relu(gradient, x, mean, inverse, weight, bias) if relu else gradient.to(mean.dtype)
    dx = dy - torch.addcmul(_over(shift, x), normalized(x, mean, inverse, None, None), _over(slope, x))
    return (dx * _over(inverse if weight is None else inverse * weight, x)).to(x.dtype)


def _behind_relu(gradient: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, *affine: Tensor | None) -> Tensor:
    return gradient.to(mean.dtype).masked_fill(normalized(x, mean, inverse, *affine) <= 0, 0)


def _over(numbers: Tensor, x: Tensor) -> Tensor:
    """[microbatches or 1, channels] as it broadcasts to [microbatches, samples, channels, ...]."""
    return numbers.view(len(numbers), 1, -1, *[1] * (x.dim() - 3))


def follow(mean: Tensor, var: Tensor, count: Tensor | None, momentum: float | None, terms: Tensor) -> None:
    """r ← (1 − m)·r + m·s for all terms at once: their sum with the weights that one update after the other gives
    them."""
    number, buffers = len(terms), [mean, var]
    if momentum is None:
        assert count is not None
        for buffer, term in zip(buffers, terms.mean(0).unbind(0), strict=True):
            buffer.lerp_(term.to(buffer.dtype), (number / count.to(terms.dtype)).to(buffer.dtype))
        return
    exponents = torch.arange(number - 1, -1, -1, device=terms.device, dtype=terms.dtype)
    weights = momentum * (1.0 - momentum) ** exponents
    torch._foreach_mul_(buffers, (1.0 - momentum) ** number)
    torch._foreach_add_(buffers, (terms * weights[:, None, None]).sum(0).unbind(0))
