"""Batch norm of channels of which several ranks hold parts.

Ranks exchange the moments of what they have and combine them (Chan, Golub and LeVeque, 1979), so that nothing is
computed as a small difference of large numbers. In the backward pass they add up two sums for each channel. On a CPU
torch's own loops of the plain layer run over the activations. On a GPU these crash without a weight and refuse a rank
without samples; there what lies between the exchanges is one operation each, of the kernels of `microbatch_norm`. How
many numbers every rank has is known from the plan, so that a GPU's host never waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from convoy.comm.collectives import all_gather, all_reduce
from convoy.ops.constants import Constants
from convoy.ops.context import exchanged
from convoy.ops.gpu import is_watched
from convoy.ops.microbatch_norm import (
    arranged,
    arranged_as,
    at_once,
    batch_norm_kernels,
    ended,
    fits,
    follow,
    gradient_sums,
    input_gradient,
    normalized,
    wide_type,
)
from convoy.ops.statistics import Following, add_term


@dataclass(frozen=True)
class Holders:
    """The ranks that hold parts of the same channels."""

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


def normalize_together(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Following | None,
    eps: float,
    holders: Holders,
    relu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Normalize by the mean and variance over all ranks: this rank's part of the result. The first arguments are those
    of `Branch`; `residual`, of the shape of `x`, is added before the ReLU that may follow."""
    if not at_once(x):
        return ended(_OnCpu.apply(x, weight, bias, running, eps, holders), residual, relu)
    branch = Branch(x, weight, bias, running, eps)
    if fits(residual, x):
        return _on_gpu((branch,), holders, relu, residual)
    return ended(_on_gpu((branch,), holders, False, None), residual, relu)


def normalize_both(first: Branch, second: Branch, holders: Holders, relu: bool) -> Tensor:
    """The sum of two batch norms, with a ReLU or without. On a GPU they share their messages."""
    if at_once(first.x) and first.x.shape == second.x.shape and first.x.dtype == second.x.dtype:
        return _on_gpu((second, first), holders, relu, None)
    y = normalize_together(second.x, second.weight, second.bias, second.running, second.eps, holders)
    return normalize_together(first.x, first.weight, first.bias, first.running, first.eps, holders, relu, y)


def _on_gpu(branches: Sequence[Branch], holders: Holders, relu: bool, residual: Tensor | None) -> Tensor:
    tensors = [tensor for branch in branches for tensor in (branch.x, branch.weight, branch.bias)]
    statistics = tuple((branch.running, branch.eps) for branch in branches)
    result: Tensor = _OnGpu.apply(statistics, holders, relu, residual, *tensors)
    return result


class _OnGpu(torch.autograd.Function):
    """The sum of batch norms, and perhaps of a residual, perhaps with a ReLU. They exchange one message each way."""

    @staticmethod
    def forward(
        ctx: Any,
        buffers_and_eps: tuple[tuple[Following | None, float], ...],
        holders: Holders,
        relu: bool,
        residual: Tensor | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        branches = [tensors[place : place + 3] for place in range(0, len(tensors), 3)]
        inputs = [arranged(x) for x, _, _ in branches]  # type: ignore[arg-type]
        inputs = [inputs[0], *(arranged_as(inputs[0], x) for x in inputs[1:])]
        moments_of_rank = [_run("channel_moments", x) for x in inputs]
        gathered = exchanged(all_gather, _stacked(moments_of_rank), holders.group)
        y = None if residual is None else arranged_as(inputs[0], residual)
        saved: list[Tensor | None] = []
        for number, (x, (_, weight, bias), (running, eps)) in enumerate(
            zip(inputs, branches, buffers_and_eps, strict=True)
        ):
            moments = gathered if len(branches) == 1 else gathered[:, number]
            buffers = () if running is None else (running.mean, running.var, running.count, running.momentum)
            with_relu = relu and number == len(branches) - 1
            y, statistics = _run(
                "normalize_shared", x, moments, weight, bias, y, *(buffers or (None,) * 4), eps, with_relu
            )
            saved += [x, weight, bias, statistics]
        has_sum = residual is not None or len(branches) > 1
        ctx.save_for_backward(y if relu and has_sum else None, *saved)
        ctx.holders, ctx.relu, ctx.has_residual = holders, relu, residual is not None
        assert y is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        y, *saved = ctx.saved_tensors
        branches = [saved[place : place + 4] for place in range(0, len(saved), 4)]
        dy, relu = arranged_as(branches[0][0], gradient), ctx.relu and y is None
        branch_sums = []
        for x, weight, bias, statistics in branches:
            sums, shift, slope, masked = _run("shared_gradient_sums", dy, x, y, weight, bias, statistics, relu)
            if y is not None:  # once: behind the ReLU the gradient is that of every term of the sum
                dy, y = masked, None
            branch_sums.append((sums, shift, slope))
        needed, gradients = ctx.needs_input_grad[4:], []
        needs_dx = [needed[3 * number] for number in range(len(branches))]
        if any(needs_dx):
            totals = all_reduce(_stacked([sums for sums, _, _ in branch_sums]), ctx.holders.group)
        for number, ((x, weight, bias, statistics), (_, shift, slope)) in enumerate(
            zip(branches, branch_sums, strict=True)
        ):
            dx = None
            if needs_dx[number]:
                total = totals if len(branches) == 1 else totals[number]
                numbers = x, weight, bias, statistics, total, ctx.holders.total
                dx = _run("shared_input_gradient", dy, *numbers, relu)
            has_weight, has_bias = needed[3 * number + 1 : 3 * number + 3]
            gradients += [dx, slope if has_weight else None, shift if has_bias else None]
        return None, None, None, dy if ctx.has_residual and ctx.needs_input_grad[3] else None, *gradients


def _stacked(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors)


def own_moments(x: Tensor) -> Tensor:
    """Mean and biased variance of this rank's part, [2, channels]: of torch's operations, to be compiled."""
    if x.numel() == 0:
        return torch.stack([x.sum(_summed_dims(x), dtype=wide_type(x.dtype))] * 2)
    var, mean = torch.var_mean(x.to(wide_type(x.dtype)), _summed_dims(x), correction=0)
    return torch.stack([mean, var])


def all_moments(own: Tensor, running: Following | None, holders: Holders) -> Tensor:
    """The moments over all ranks, from `own_moments` of each."""
    moments: Tensor = _Combine.apply(own, running, holders)
    return moments


def normalize_by(x: Tensor, weight: Tensor | None, bias: Tensor | None, moments: Tensor, eps: float) -> Tensor:
    """This rank's part of `normalize_together`, from `all_moments`: of torch's operations, to be compiled."""
    mean, var = moments[:, None].unbind(0)
    return normalized(x[None], mean, (var + eps).rsqrt(), weight, bias)[0].to(x.dtype)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, running: Following | None, holders: Holders) -> Tensor:
        gathered = exchanged(all_gather, own.contiguous(), holders.group)
        shares = holders.shares.like(gathered)[:, None, None]
        mean, var = (gathered * shares).sum(0).unbind(0)
        var = var + ((gathered[:, 0] - mean).square_() * shares[:, 0]).sum(0)
        if running is not None:
            term = torch.stack([mean, var * (holders.total / max(1, holders.total - 1))])
            follow(running.mean, running.var, running.count, running.momentum, term[None])
        ctx.save_for_backward(own, mean)
        ctx.holders = holders
        return torch.stack([mean, var])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own, mean = ctx.saved_tensors
        share = ctx.holders.own_share
        of_mean, of_var = all_reduce(gradient.contiguous().clone(), ctx.holders.group).unbind(0)
        return torch.stack([of_mean + 2 * of_var * (own[0] - mean), of_var]) * share, None, None


torch.library.define("convoy::channel_moments", "(Tensor x) -> Tensor")
torch.library.define(
    "convoy::normalize_shared",
    "(Tensor x, Tensor gathered, Tensor? weight, Tensor? bias, Tensor? residual, Tensor(a!)? running_mean, "
    "Tensor(b!)? running_var, Tensor? count, float? momentum, float eps, bool relu) -> (Tensor, Tensor)",
)
torch.library.define(
    "convoy::shared_gradient_sums",
    "(Tensor gradient, Tensor x, Tensor? y, Tensor? weight, Tensor? bias, Tensor statistics, bool relu) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "convoy::shared_input_gradient",
    "(Tensor gradient, Tensor x, Tensor? weight, Tensor? bias, Tensor statistics, Tensor sums, int total, bool relu) "
    "-> Tensor",
)


def _moments(x: Tensor) -> Tensor:
    """Count, mean and sum of squared deviations of this rank's part: [3, channels]."""
    if x.numel() == 0:
        return _fake_moments(x).zero_()
    kernels = batch_norm_kernels(x)
    if kernels is not None:
        moments: Tensor = kernels.moments(x, (len(x),))[0]
        return moments
    var, mean = torch.var_mean(x.to(wide_type(x.dtype)), _summed_dims(x), correction=0)
    count = x.numel() // x.shape[1]
    return torch.stack([torch.full_like(mean, count), mean, var * count])


def _normalize(
    x: Tensor,
    gathered: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    count: Tensor | None,
    momentum: float | None,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """This rank's part of the result, from the moments of all ranks, [ranks, 3, channels]; mean and 1 / √(variance +
    eps), [1, 2, channels]."""
    kernels, buffers = batch_norm_kernels(x), (running_mean, running_var, count, momentum)
    if kernels is not None:
        settings = (len(x),), eps, relu, False
        y, statistics, _ = kernels.normalize(x, gathered, weight, bias, residual, *buffers, *settings)
        return y, statistics
    counts, means, squares = gathered.unbind(1)
    total = counts.sum(0)
    mean = (means * counts).sum(0) / total
    square = (squares + (means - mean).square_() * counts).sum(0)
    if running_mean is not None and running_var is not None:
        term = torch.stack([mean, square / (total - 1).clamp_(min=1)])
        follow(running_mean, running_var, count, momentum, term[None])
    statistics = torch.stack([mean, (square / total + eps).rsqrt_()])
    y = normalized(x[None], mean[None], statistics[1:], weight, bias)[0].to(x.dtype)
    return ended(y, residual, relu), statistics[None]


def _gradient_sums(
    gradient: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums of dy and of dy · x̂ over this rank's part: together, [1, 2, channels], to be added up over all ranks;
    one by one; and the gradient behind the ReLU, or nothing where its result `y` is not given."""
    kernels = batch_norm_kernels(x) if x.numel() else None
    if kernels is not None:
        sums, shift, slope, masked = kernels.gradient_sums(
            gradient, x, y, weight, bias, statistics, (len(x),), relu, True
        )
    else:
        masked = None if y is None else gradient.masked_fill(y <= 0, 0)
        dy, relu = gradient if masked is None else masked, relu and y is None
        sums = gradient_sums(dy[None], x[None], weight, bias, statistics, relu)
        shift, slope = (total.clone() for total in sums[0].unbind(0))  # results must not share memory
    return sums, shift, slope, gradient.new_empty(0) if masked is None else masked


def _input_gradient(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    sums: Tensor,
    total: int,
    relu: bool,
) -> Tensor:
    if x.numel() == 0:
        return torch.empty_like(x)
    kernels, numbers = batch_norm_kernels(x), (weight, bias, statistics)
    if kernels is None:
        return input_gradient(gradient[None], x[None], *numbers, sums / total, relu)[0]
    dx: Tensor = kernels.input_gradient(gradient, x, *numbers, sums, (len(x),), total, relu)[0]
    return dx


def _fake_moments(x: Tensor) -> Tensor:
    return x.new_empty(3, x.shape[1], dtype=wide_type(x.dtype))


def _fake_normalize(x: Tensor, gathered: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), gathered.new_empty(1, 2, x.shape[1])


def _fake_sums(gradient: Tensor, x: Tensor, y: Any, weight: Any, bias: Any, statistics: Tensor, *_: Any) -> Any:
    numbers = (statistics.new_empty(x.shape[1]) for _ in range(2))
    masked = gradient.new_empty(0) if y is None else torch.empty_like(gradient)
    return torch.empty_like(statistics), *numbers, masked


torch.library.impl("convoy::channel_moments", "default", _moments)
torch.library.impl("convoy::normalize_shared", "default", _normalize)
torch.library.impl("convoy::shared_gradient_sums", "default", _gradient_sums)
torch.library.impl("convoy::shared_input_gradient", "default", _input_gradient)
torch.library.register_fake("convoy::channel_moments", _fake_moments)
torch.library.register_fake("convoy::normalize_shared", _fake_normalize)
torch.library.register_fake("convoy::shared_gradient_sums", _fake_sums)
torch.library.register_fake("convoy::shared_input_gradient", lambda dy, x, *_: torch.empty_like(x))

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "channel_moments": _moments,
    "normalize_shared": _normalize,
    "shared_gradient_sums": _gradient_sums,
    "shared_input_gradient": _input_gradient,
}


def _run(operation: str, x: Tensor, *rest: Any) -> Any:
    run = getattr(torch.ops.convoy, operation) if is_watched(x) else _FUNCTIONS[operation]
    return run(x, *rest)


def _summed_dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


class _OnCpu(torch.autograd.Function):
    """Batch norm by the loops of torch's plain layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: Following | None,
        eps: float,
        holders: Holders,
    ) -> Tensor:
        moments = unused = torch.zeros(2, x.shape[1], dtype=(x if weight is None else weight).dtype, device=x.device)
        if x.numel():
            moments = torch.stack(torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0))  # they only say the type
        gathered = exchanged(all_gather, moments, holders.group)
        shares = holders.shares.like(gathered)[:, None, None]
        mean, var = (gathered * shares).sum(0).unbind(0)
        var = var + ((gathered[:, 0] - mean).square_() * shares[:, 0]).sum(0)
        if running is not None:
            term = mean, var * (holders.total / max(1, holders.total - 1))
            momentum = 1.0 / float(running.count) if running.momentum is None else running.momentum  # type: ignore[arg-type]
            add_term([running.mean, running.var], term, [momentum] * 2)
        ctx.save_for_backward(x, weight, mean, var)
        ctx.eps, ctx.holders = eps, holders
        if x.numel() == 0:
            return torch.empty_like(x)
        return torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """dx = weight / √(variance + eps) · (dy − mean(dy) − x̂ · mean(dy · x̂)), the means over all ranks."""
        x, weight, mean, var = ctx.saved_tensors
        gradient, inverse = arranged_as(x, gradient), (var + ctx.eps).rsqrt()
        slope, shift = torch.zeros_like(mean), torch.zeros_like(mean)
        if x.numel():
            _, slope, shift = torch.ops.aten.native_batch_norm_backward(
                gradient, x, None, mean, var, mean, inverse, False, ctx.eps, [False, True, True]
            )
        needed, dx = ctx.needs_input_grad, None
        if needed[0]:
            sums = all_reduce(torch.stack([slope, shift]), ctx.holders.group)
            dx = gradient
        if needed[0] and x.numel():
            slope_mean, mean_gradient = (sums / ctx.holders.total).unbind(0)
            scale = inverse if weight is None else inverse * weight
            wide = x.to(scale.dtype)  # so that low precision is rounded to once
            # the last two terms first, again as a batch norm of x
            numbers = -scale * slope_mean, -scale * mean_gradient, mean, var
            dx = torch.native_batch_norm(wide, *numbers, False, 0.0, ctx.eps)[0]
            dx.addcmul_(gradient.to(dx.dtype), scale.view(-1, *[1] * (x.dim() - 2)))
            dx = dx.to(x.dtype)
        return dx, slope if needed[1] else None, shift if needed[2] else None, None, None, None
