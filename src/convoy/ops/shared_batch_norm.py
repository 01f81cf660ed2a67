"""Batch norm of channels of which several ranks hold parts.

Ranks exchange the moments of what they have and combine them (Chan, Golub and LeVeque, 1979), so that nothing is
computed as a small difference of large numbers. In the backward pass they add up two sums for each channel. On a CPU
torch's own loops of the plain layer run over the activations. On a GPU these crash without a weight and refuse a rank
without samples; there what lies between the exchanges is one operation each, of the kernels of `microbatch_norm`. How
many numbers every rank has is known from the plan, so that a GPU's host never waits.
"""

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
from convoy.ops.microbatch_norm import (
    arranged,
    arranged_as,
    at_once,
    batch_norm_kernels,
    follow,
    gradient_sums,
    input_gradient,
    normalized,
    starts_of,
    wide_type,
)
from convoy.ops.statistics import add_term


@dataclass(frozen=True)
class Holders:
    """The ranks that hold parts of the same channels.

    Attributes:
        counts: how many numbers of each channel every rank has.
    """

    group: ProcessGroup
    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        """How many numbers each channel has on all ranks."""
        return sum(self.counts)

    @property
    def own_share(self) -> float:
        """Which share of them this rank has."""
        return self.counts[self.group.rank()] / self.total

    @cached_property
    def shares(self) -> Constants:
        """Which share of them each rank has: [ranks]."""
        return Constants([count / self.total for count in self.counts])


@dataclass(frozen=True)
class Following:
    """Running mean and variance, [channels] each, which a pass brings up to date.

    Attributes:
        momentum: weight of what the pass sees; None for one by the number of terms.
        count: this number, with the term that is to come.
    """

    mean: Tensor
    var: Tensor
    momentum: float | None
    count: Tensor | None = None


def normalize_together(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Following | None,
    eps: float,
    holders: Holders,
    relu: bool = False,
) -> Tensor:
    """Normalize by the mean and variance over all ranks: this rank's part of the result.

    Args:
        x: [samples, channels, ...], this rank's part, perhaps without samples.
        weight, bias: [channels] or None.
        running: brought up to date; None where nobody keeps them.
        eps: added to the variance.
        holders: the ranks that have the other parts.
        relu: whether a ReLU follows at once.
    """
    if at_once(x):
        result: Tensor = _OnGpu.apply(x, weight, bias, running, eps, holders, relu)
        return result
    result = _OnCpu.apply(x, weight, bias, running, eps, holders)
    return result.relu_() if relu else result


class _OnGpu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: Following | None,
        eps: float,
        holders: Holders,
        relu: bool,
    ) -> Tensor:
        x = arranged(x)
        gathered = exchanged(all_gather, torch.ops.convoy.channel_moments(x), holders.group)
        followed: tuple[Any, ...] = (None, None, None, None)
        if running is not None:
            followed = running.mean, running.var, running.count, running.momentum
        y, statistics = torch.ops.convoy.normalize_shared(x, gathered, weight, bias, *followed, eps, relu)
        ctx.save_for_backward(x, weight, bias, statistics)
        ctx.holders, ctx.relu = holders, relu
        return y  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias, statistics = ctx.saved_tensors
        given = arranged_as(x, gradient), x, weight, bias, statistics
        sums, own = torch.ops.convoy.shared_gradient_sums(*given, ctx.relu)
        needed, dx = ctx.needs_input_grad, None
        if needed[0]:
            sums = all_reduce(sums, ctx.holders.group)
            dx = torch.ops.convoy.shared_input_gradient(*given, sums, ctx.holders.total, ctx.relu)
        shift, slope = own.unbind(0)
        return dx, slope if needed[1] else None, shift if needed[2] else None, None, None, None, None


def own_moments(x: Tensor) -> Tensor:
    """Mean and biased variance of this rank's part, [2, channels]: of torch's operations, to be compiled."""
    if x.numel() == 0:
        return torch.stack([x.sum(_others(x), dtype=wide_type(x.dtype))] * 2)
    var, mean = torch.var_mean(x.to(wide_type(x.dtype)), _others(x), correction=0)
    return torch.stack([mean, var])


def all_moments(own: Tensor, running: Following | None, holders: Holders) -> Tensor:
    """Those of all ranks together, from `own_moments` of each."""
    found: Tensor = _Combine.apply(own, running, holders)
    return found


def normalize_by(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, moments: Tensor, eps: float, relu: bool
) -> Tensor:
    """This rank's part of `normalize_together`, from `all_moments`: of torch's operations, to be compiled."""
    mean, var = moments[:, None].unbind(0)
    y = normalized(x[None], mean, (var + eps).rsqrt(), weight, bias)[0].to(x.dtype)
    return y.relu() if relu else y


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
    "(Tensor x, Tensor gathered, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "Tensor? count, float? momentum, float eps, bool relu) -> (Tensor, Tensor)",
)
torch.library.define(
    "convoy::shared_gradient_sums",
    "(Tensor gradient, Tensor x, Tensor? weight, Tensor? bias, Tensor statistics, bool relu) -> (Tensor, Tensor)",
)
torch.library.define(
    "convoy::shared_input_gradient",
    "(Tensor gradient, Tensor x, Tensor? weight, Tensor? bias, Tensor statistics, Tensor sums, int total, bool relu) "
    "-> Tensor",
)


@torch.library.impl("convoy::channel_moments", "default")
def _moments(x: Tensor) -> Tensor:
    """Count, mean and sum of squared deviations of this rank's part: [3, channels]."""
    if x.numel() == 0:
        return _fake_moments(x).zero_()
    kernels = batch_norm_kernels(x)
    if kernels is not None:
        found: Tensor = kernels.moments(x, _starts(x))[0]
        return found
    var, mean = torch.var_mean(x.to(wide_type(x.dtype)), _others(x), correction=0)
    count = x.numel() // x.shape[1]
    return torch.stack([torch.full_like(mean, count), mean, var * count])


@torch.library.impl("convoy::normalize_shared", "default")
def _normalize(
    x: Tensor,
    gathered: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    count: Tensor | None,
    momentum: float | None,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """This rank's part of the result, from the moments of all; mean and 1 / √(variance + eps), [2, channels]."""
    kernels = batch_norm_kernels(x)
    if kernels is not None:
        followed = running_mean, running_var, count, momentum
        y, statistics, _ = kernels.normalize(x, gathered[None], weight, bias, *followed, _starts(x), eps, relu)
        return y, statistics[0]
    counts, means, squares = gathered.unbind(1)
    total = counts.sum(0)
    mean = (means * counts).sum(0) / total
    square = (squares + (means - mean).square_() * counts).sum(0)
    if running_mean is not None and running_var is not None:
        term = torch.stack([mean, square / (total - 1).clamp_(min=1)])
        follow(running_mean, running_var, count, momentum, term[None])
    statistics = torch.stack([mean, (square / total + eps).rsqrt_()])
    y = normalized(x[None], mean[None], statistics[1:], weight, bias)[0].to(x.dtype)
    return y.relu_() if relu else y, statistics


@torch.library.impl("convoy::shared_gradient_sums", "default")
def _gradient_sums(
    gradient: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    """The sums of dy and of dy · x̂ over this rank's part, [2, channels]; twice, for one of them is to be added up."""
    if x.numel() == 0:
        sums = torch.zeros_like(statistics)
        return sums, sums.clone()
    kernels = batch_norm_kernels(x)
    if kernels is None:
        sums = gradient_sums(gradient[None], x[None], weight, bias, statistics[None], relu)[0]
    else:
        sums = kernels.gradient_sums(gradient, x, weight, bias, statistics, _starts(x), relu)[0]
    return sums, sums.clone()


@torch.library.impl("convoy::shared_input_gradient", "default")
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
    kernels = batch_norm_kernels(x)
    if kernels is None:
        return input_gradient(gradient[None], x[None], weight, bias, statistics[None], (sums / total)[None], relu)[0]
    found: Tensor = kernels.input_gradient(gradient, x, weight, bias, statistics, sums, _starts(x), total, relu)
    return found


def _fake_moments(x: Tensor) -> Tensor:
    return x.new_empty(3, x.shape[1], dtype=wide_type(x.dtype))


def _fake_normalize(x: Tensor, gathered: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), gathered.new_empty(2, x.shape[1])


torch.library.register_fake("convoy::channel_moments", _fake_moments)
torch.library.register_fake("convoy::normalize_shared", _fake_normalize)
torch.library.register_fake(
    "convoy::shared_gradient_sums", lambda dy, x, w, b, statistics, relu: (torch.empty_like(statistics),) * 2
)
torch.library.register_fake("convoy::shared_input_gradient", lambda dy, x, *_: torch.empty_like(x))


def _starts(x: Tensor) -> Tensor:
    return starts_of((len(x),)).like(x, torch.int64)


def _others(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


class _OnCpu(torch.autograd.Function):
    """By the loops of the plain layer."""

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
        own = unused = torch.zeros(2, x.shape[1], dtype=(x if weight is None else weight).dtype, device=x.device)
        if x.numel():
            own = torch.stack(torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0))  # they only say the type
        gathered = exchanged(all_gather, own, holders.group)
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
