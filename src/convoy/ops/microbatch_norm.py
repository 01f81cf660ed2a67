"""Batch norm on a GPU: of several microbatches in one go, each by its own mean and variance, or of channels of which
several ranks hold parts.

On the CPU one microbatch follows the other, which keeps each in the caches. On a GPU that would be a launch of every
kernel for each of them, so there all run at once: by Triton where it is installed, as it is beside torch for CUDA on
Linux, otherwise by a few of torch's own operations. What `torch.compile` traces are these operations, so that it can
fuse them with what follows.

Forward these are the moments of each microbatch, an exchange where several ranks hold parts, and the normalization;
backward the sums of the gradient, their sum over the ranks, and the input's gradient.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from convoy.comm.collectives import all_gather, all_reduce
from convoy.ops.constants import Constants
from convoy.ops.context import exchanged
from convoy.ops.gpu import is_watched, triton_kernels
from convoy.ops.statistics import Following


@dataclass(frozen=True)
class Holders:
    """The ranks that hold parts of the same channels. How many numbers every rank has is known from the plan, so that a
    GPU's host never waits."""

    group: ProcessGroup
    counts: tuple[int, ...]  # how many numbers of each channel every rank has

    @property
    def total(self) -> int:
        """How many numbers each channel has on all ranks."""
        return sum(self.counts)

    @property
    def own_share(self) -> float:
        """This rank's share of them."""
        return self.counts[self.group.rank()] / self.total

    @cached_property
    def shares(self) -> Constants:
        """Each rank's share of them: [ranks]."""
        return Constants([count / self.total for count in self.counts])


@dataclass(frozen=True)
class Branch:
    """A batch norm of this rank's part."""

    x: Tensor  # [samples, channels, ...], perhaps without samples
    weight: Tensor | None  # [channels] or None
    bias: Tensor | None  # [channels] or None
    running: Following | None  # updated by the call; None where nobody keeps them
    eps: float  # added to the variance


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
    if torch.compiler.is_compiling():
        moments = _moments_by_torch(x, sizes)
        y, _, terms = _normalized_by_torch(x, moments, weight, bias, sizes, eps)
        y, terms, is_followed = ended(y, residual, relu), terms.detach(), False
    else:
        is_followed = len(sizes) == 1
        branch = Branch(x, weight, bias, running if is_followed else None, eps)
        y, terms = fused((branch,), None, relu, residual, tuple(sizes))
    if running is not None and not is_followed:
        follow(running.mean, running.var, running.count, running.momentum, terms)
    return y, terms


def ended(y: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """The result after its residual and ReLU, written over it."""
    if residual is not None:
        y = y.add_(residual) if _fits(residual, y) and y.is_floating_point() else y + residual
    return y.relu_() if relu else y


def _fits(residual: Tensor | None, x: Tensor) -> bool:
    """Whether the kernels of `x` can add a residual."""
    return residual is None or (residual.shape == x.shape and residual.dtype == x.dtype)


def fused(
    branches: Sequence[Branch], holders: Holders | None, relu: bool, residual: Tensor | None, sizes: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The sum of batch norms, and perhaps of a residual, perhaps with a ReLU; and for a single one without `holders`
    the terms of its running statistics. Of several `sizes` of microbatches each is normalized by itself."""
    tensors = [tensor for branch in branches for tensor in (branch.x, branch.weight, branch.bias)]
    statistics = tuple((branch.running, branch.eps) for branch in branches)
    is_fused = _fits(residual, branches[0].x)
    inside = (relu, residual) if is_fused else (False, None)
    y, terms = _Fused.apply(statistics, holders, sizes, *inside, *tensors)
    return y if is_fused else ended(y, residual, relu), terms


class _Fused(torch.autograd.Function):
    """With `holders` the branches exchange one message each way."""

    @staticmethod
    def forward(
        ctx: Any,
        buffers_and_eps: tuple[tuple[Following | None, float], ...],
        holders: Holders | None,
        sizes: tuple[int, ...],
        relu: bool,
        residual: Tensor | None,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        branches = [tensors[place : place + 3] for place in range(0, len(tensors), 3)]
        inputs = [arranged(x) for x, _, _ in branches]  # type: ignore[arg-type]
        inputs = [inputs[0], *(arranged_as(inputs[0], x) for x in inputs[1:])]
        all_moments: list[Tensor | None] = [None]  # computed where it is one operation
        if holders is not None:
            message = _stacked([_run("channel_moments", x, sizes)[0] for x in inputs])
            gathered = exchanged(all_gather, message, holders.group)
            all_moments = [gathered] if len(branches) == 1 else list(gathered.unbind(1))
        y = None if residual is None else arranged_as(inputs[0], residual)
        saved: list[Tensor | None] = []
        for number, (x, moments, (_, weight, bias), (running, eps)) in enumerate(
            zip(inputs, all_moments, branches, buffers_and_eps, strict=True)
        ):
            buffers = () if running is None else (running.mean, running.var, running.count, running.momentum)
            ends = relu and number == len(branches) - 1
            settings = moments, weight, bias, y, *(buffers or (None,) * 4), sizes, eps, ends
            y, statistics, terms = _run(
                "normalize_microbatches" if moments is None else "normalize_shared", x, *settings
            )
            saved += [x, weight, bias, statistics]
        has_sum = residual is not None or len(branches) > 1
        ctx.save_for_backward(y if relu and has_sum else None, *saved)
        ctx.holders, ctx.sizes, ctx.relu, ctx.has_residual = holders, sizes, relu, residual is not None
        assert y is not None
        if holders is not None:
            return y, None
        ctx.mark_non_differentiable(terms)
        ctx.set_materialize_grads(False)  # that of the terms would be zeros
        return y, terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, _: None) -> Any:
        """dx = weight / √(variance + eps) · (dy − mean(dy) − x̂ · mean(dy · x̂)); the gradients of weight and bias."""
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        y, *saved = ctx.saved_tensors
        branches = [saved[place : place + 4] for place in range(0, len(saved), 4)]
        dy, relu, holders, sizes = arranged_as(branches[0][0], gradient), ctx.relu and y is None, ctx.holders, ctx.sizes
        needed, gradients = ctx.needs_input_grad[5:], list[Tensor | None]()
        if holders is None:
            x, *numbers = branches[0]
            dx, shift, slope, masked = _run("normalize_microbatches_backward", dy, x, y, *numbers, sizes, relu)
            results = zip((dx, slope, shift), needed, strict=True)
            of_residual = (dy if y is None else masked) if ctx.needs_input_grad[4] else None
            return (
                None,
                None,
                None,
                None,
                of_residual,
                *(result if is_needed else None for result, is_needed in results),
            )
        branch_sums = []
        for x, weight, bias, statistics in branches:
            sums, shift, slope, masked = _run("shared_gradient_sums", dy, x, y, weight, bias, statistics, sizes, relu)
            if y is not None:  # once: behind the ReLU the gradient is that of every term of the sum
                dy, y = masked, None
            branch_sums.append((sums, shift, slope))
        needs_dx = [needed[3 * number] for number in range(len(branches))]
        totals = [sums for sums, _, _ in branch_sums]
        if any(needs_dx):
            total = all_reduce(_stacked(totals), holders.group)
            totals = [total] if len(branches) == 1 else list(total)
        for number, ((x, weight, bias, statistics), (_, shift, slope)) in enumerate(
            zip(branches, branch_sums, strict=True)
        ):
            dx = None
            if needs_dx[number]:
                numbers = x, weight, bias, statistics, totals[number], sizes, holders.total, relu
                dx = _run("shared_input_gradient", dy, *numbers)[0]
            has_weight, has_bias = needed[3 * number + 1 : 3 * number + 3]
            gradients += [dx, slope if has_weight else None, shift if has_bias else None]
        return None, None, None, None, dy if ctx.has_residual and ctx.needs_input_grad[4] else None, *gradients


def _stacked(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors)


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


def batch_norm_kernels(x: Tensor) -> ModuleType | None:
    """The kernels of Triton, where they run."""
    return triton_kernels("microbatch_kernels", "batch norm", x)


def _moments(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Count, mean and sum of squared deviations of every microbatch: [microbatches, 3, channels]."""
    if x.numel() == 0:
        return _fake_moments(x, sizes).zero_()
    kernels = batch_norm_kernels(x)
    moments: Tensor = _moments_by_torch(x, sizes) if kernels is None else kernels.moments(x, sizes)
    return moments


def _normalize(
    x: Tensor,
    moments: Tensor | None,
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
    """The result from the moments of one microbatch's parts on all ranks, or else from those of every microbatch; mean
    and 1 / √(variance + eps), and mean and unbiased variance: [microbatches, 2, channels] each."""
    wants_terms = moments is None
    moments = _moments(x, sizes) if moments is None else moments
    kernels, buffers = batch_norm_kernels(x), (running_mean, running_var, count, momentum)
    if kernels is not None:
        y, statistics, terms = kernels.normalize(
            x, moments, weight, bias, residual, *buffers, sizes, eps, relu, wants_terms
        )
        return y, statistics, statistics.new_empty(0) if terms is None else terms
    y, statistics, terms = _normalized_by_torch(x, moments, weight, bias, sizes, eps)
    if running_mean is not None and running_var is not None:
        follow(running_mean, running_var, count, momentum, terms)
    return ended(y, residual, relu), statistics, terms


def _gradient_sums(
    gradient: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    sizes: Sequence[int],
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums of dy and of dy · x̂ over every microbatch: together, [microbatches, 2, channels]; of a single one also
    by themselves; and the gradient behind the ReLU, or nothing where its result `y` is not given."""
    kernels = batch_norm_kernels(x) if x.numel() else None
    nothing = gradient.new_empty(0)
    if kernels is not None:
        is_single = len(sizes) == 1
        sums, shift, slope, masked = kernels.gradient_sums(
            gradient, x, y, weight, bias, statistics, sizes, relu, is_single
        )
        shift, slope = (shift, slope) if is_single else (nothing, nothing.clone())
        return sums, shift, slope, nothing.clone() if masked is None else masked
    masked = None if y is None else gradient.masked_fill(y <= 0, 0)
    dy, relu = gradient if masked is None else masked, relu and y is None
    rows = _by_run(sizes, dy, x, statistics=statistics)
    sums = _joined([_sums_of_run(dy, x, weight, bias, numbers, relu) for dy, x, numbers in rows])
    shift, slope = _sums_apart(sums)
    return sums, shift, slope, nothing if masked is None else masked


def _input_gradient(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    sums: Tensor,
    sizes: Sequence[int],
    total: int | None,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx from the sums over `total` numbers of each channel, by default those of the microbatch; of several
    microbatches also the sums over all."""
    if x.numel() == 0:
        return torch.empty_like(x), sums.new_empty(0), sums.new_empty(0)
    kernels, is_single = batch_norm_kernels(x), len(sizes) == 1
    if kernels is not None:
        arguments = gradient, x, weight, bias, statistics, sums, sizes, total, relu
        dx, shift, slope = kernels.input_gradient(*arguments, not is_single)
        return (dx, sums.new_empty(0), sums.new_empty(0)) if is_single else (dx, shift, slope)
    results, begin = [], 0
    for dy, part, numbers in _by_run(sizes, gradient, x, statistics=statistics):
        means = sums[begin : begin + len(part)] / (total or part.shape[1] * math.prod(part.shape[3:]))
        results.append(_input_gradient_of_run(dy, part, weight, bias, numbers, means, relu).flatten(0, 1))
        begin += len(part)
    return _joined(results), *_sums_apart(sums)


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
    """The input's gradient, those of bias and weight, and that behind the ReLU."""
    numbers = weight, bias, statistics
    sums, shift, slope, masked = _gradient_sums(gradient, x, y, *numbers, sizes, relu)
    dx, *whole = _input_gradient(gradient if y is None else masked, x, *numbers, sums, sizes, None, relu)
    return dx, *(whole if len(sizes) > 1 else (shift, slope)), masked


def _sums_apart(sums: Tensor) -> tuple[Tensor, Tensor]:
    shift, slope = (total.clone() for total in sums.sum(0).unbind(0))  # results must not share memory
    return shift, slope


def _fake_moments(x: Tensor, sizes: Sequence[int]) -> Tensor:
    return x.new_empty(len(sizes), 3, x.shape[1], dtype=wide_type(x.dtype))


def _fake_normalize(x: Tensor, moments: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    statistics, terms = _fake_moments(x, rest[7])[:, :2], _fake_moments(x, rest[7])[:, :2]
    return torch.empty_like(x), statistics.clone(), terms.clone()


def _fake_sums(gradient: Tensor, x: Tensor, y: Any, weight: Any, bias: Any, statistics: Tensor, *_: Any) -> Any:
    numbers = (statistics.new_empty(x.shape[1] if len(statistics) == 1 else 0) for _ in range(2))
    masked = gradient.new_empty(0) if y is None else torch.empty_like(gradient)
    return torch.empty_like(statistics), *numbers, masked


def _fake_backward(gradient: Tensor, x: Tensor, y: Any, weight: Any, bias: Any, statistics: Tensor, *_: Any) -> Any:
    numbers = (statistics.new_empty(x.shape[1]) for _ in range(2))
    return torch.empty_like(x), *numbers, gradient.new_empty(0) if y is None else torch.empty_like(gradient)


def _fake_input_gradient(gradient: Tensor, x: Tensor, *rest: Any) -> Any:
    numbers = (rest[3].new_empty(x.shape[1] if len(rest[3]) > 1 else 0) for _ in range(2))
    return torch.empty_like(x), *numbers


_NORMALIZES = (
    "(Tensor x, Tensor? moments, Tensor? weight, Tensor? bias, Tensor? residual, Tensor(a!)? running_mean, Tensor(b!)? "
    "running_var, Tensor? count, float? momentum, int[] sizes, float eps, bool relu) -> (Tensor, Tensor, Tensor)"
)
_SUMS = (
    "(Tensor gradient, Tensor x, Tensor? y, Tensor? weight, Tensor? bias, Tensor statistics, int[] sizes, bool relu) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_GRADIENT = (
    "(Tensor gradient, Tensor x, Tensor? weight, Tensor? bias, Tensor statistics, Tensor sums, int[] sizes, int? "
    "total, bool relu) -> (Tensor, Tensor, Tensor)"
)
# As torch sees them; of microbatches both steps of the way, forward or backward, are one.
_OPERATIONS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "channel_moments": ("(Tensor x, int[] sizes) -> Tensor", _moments, _fake_moments),
    "normalize_shared": (_NORMALIZES, _normalize, _fake_normalize),
    "normalize_microbatches": (_NORMALIZES, _normalize, _fake_normalize),
    "shared_gradient_sums": (_SUMS, _gradient_sums, _fake_sums),
    "shared_input_gradient": (_GRADIENT, _input_gradient, _fake_input_gradient),
    "normalize_microbatches_backward": (_SUMS, _backward, _fake_backward),
}
for _name, (_schema, _function, _fake) in _OPERATIONS.items():
    torch.library.define(f"convoy::{_name}", _schema)
    torch.library.impl(f"convoy::{_name}", "default", _function)
    torch.library.register_fake(f"convoy::{_name}", _fake)


def _run(operation: str, x: Tensor, *rest: Any) -> Any:
    run = getattr(torch.ops.convoy, operation) if is_watched(x) else _OPERATIONS[operation][1]
    return run(x, *rest)


# The same by torch's operations: of runs, [microbatches, samples, channels, ...], of microbatches of one size.


def _by_run(sizes: Sequence[int], *tensors: Tensor, statistics: Tensor | None = None) -> list[tuple[Tensor, ...]]:
    """The runs of tensors [samples, ...], with the rows of `statistics`, [microbatches, ...], that belong to them."""
    runs = [(len(list(run)), size) for size, run in itertools.groupby(sizes)]
    columns = []
    for x in tensors:
        parts = [x] if len(runs) == 1 else x.split([number * size for number, size in runs])
        columns.append([part.unflatten(0, run) for part, run in zip(parts, runs, strict=True)])
    if statistics is not None:
        columns.append(list(statistics.split([number for number, _ in runs])))
    return list(zip(*columns, strict=True))


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _moments_by_torch(x: Tensor, sizes: Sequence[int]) -> Tensor:
    rows = []
    for (part,) in _by_run(sizes, x):
        dims, count = [1, *range(3, part.dim())], part.shape[1] * math.prod(part.shape[3:])
        var, mean = torch.var_mean(part.to(wide_type(x.dtype)), dims, correction=0)
        rows.append(torch.stack([torch.full_like(mean, count), mean, var * count], 1))
    return _joined(rows)


def _normalized_by_torch(
    x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None, sizes: Sequence[int], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The result; mean and 1 / √(variance + eps), and mean and unbiased variance, [microbatches, 2, channels] each."""
    counts, means, squares = moments.unbind(1)
    if len(sizes) == 1 and len(moments) > 1:  # parts of one microbatch (Chan, Golub and LeVeque, 1979)
        total = counts.sum(0, keepdim=True)
        mean = (means * counts).sum(0, keepdim=True) / total
        squares = (squares + (means - mean).square() * counts).sum(0, keepdim=True)
        counts, means = total, mean
    inverse = (squares / counts + eps).rsqrt()
    statistics = torch.stack([means, inverse], 1)
    terms = torch.stack([means, squares / (counts - 1).clamp(min=1)], 1)
    rows = _by_run(sizes, x, statistics=statistics) if x.numel() else []
    results = [
        normalized(part, numbers[:, 0], numbers[:, 1], weight, bias).to(x.dtype).flatten(0, 1) for part, numbers in rows
    ]
    return _joined(results) if results else torch.empty_like(x), statistics, terms


def normalized(x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """(x − mean) · inverse · weight + bias in the wide type, of `x` [microbatches, samples, channels, ...], `mean` and
    `inverse` [microbatches, channels], and `weight` and `bias` [channels] or None."""
    scale = inverse if weight is None else inverse * weight
    y = (x - _over(mean, x)) * _over(scale, x)
    return y if bias is None else y + _over(bias[None], x)


def _sums_of_run(
    gradient: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, relu: bool
) -> Tensor:
    """The sums of dy and of dy · x̂ over each microbatch: [microbatches, 2, channels]. `statistics` are mean and 1 /
    √(variance + eps), [microbatches, 2, channels], the other tensors as in `normalized`; with `relu` the gradient is
    that of the ReLU that follows."""
    mean, inverse = statistics.unbind(1)
    dy = _behind_relu(gradient, x, mean, inverse, weight, bias) if relu else gradient.to(mean.dtype)
    dims = [1, *range(3, x.dim())]
    return torch.stack([dy.sum(dims), (dy * normalized(x, mean, inverse, None, None)).sum(dims)], 1)


def _input_gradient_of_run(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    means: Tensor,
    relu: bool,
) -> Tensor:
    """dx from mean(dy) and mean(dy · x̂), [microbatches, 2, channels]; all else is as for `_sums_of_run`."""
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
