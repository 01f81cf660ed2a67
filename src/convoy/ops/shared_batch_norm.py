"""Batch norm of channels of which several ranks hold parts.

Ranks exchange the moments of what they have and combine them (Chan, Golub and LeVeque, 1979), so that nothing is
computed as a small difference of large numbers. In the backward pass they add up two sums for each channel. On a CPU
torch's own loops of the plain layer run over the activations. On a GPU these crash without a weight and refuse a rank
without samples; there what lies between the exchanges is one operation each (`microbatch_norm.fused`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from convoy.comm.collectives import all_gather, all_reduce
from convoy.ops.context import exchanged
from convoy.ops.microbatch_norm import (
    Branch,
    Holders,
    arranged_as,
    at_once,
    ended,
    follow,
    fused,
    normalized,
    wide_type,
)
from convoy.ops.statistics import Following, add_term


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
    return fused((Branch(x, weight, bias, running, eps),), holders, relu, residual, (len(x),))[0]


def normalize_both(first: Branch, second: Branch, holders: Holders, relu: bool) -> Tensor:
    """The sum of two batch norms, with a ReLU or without. On a GPU they share their messages."""
    if at_once(first.x) and first.x.shape == second.x.shape and first.x.dtype == second.x.dtype:
        return fused((second, first), holders, relu, None, (len(first.x),))[0]
    y = normalize_together(second.x, second.weight, second.bias, second.running, second.eps, holders)
    return normalize_together(first.x, first.weight, first.bias, first.running, first.eps, holders, relu, y)


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


def _combined(own: Tensor, holders: Holders) -> tuple[Tensor, Tensor]:
    """Mean and variance over all ranks, from those of each."""
    gathered = exchanged(all_gather, own, holders.group)
    shares = holders.shares.like(gathered)[:, None, None]
    mean, var = (gathered * shares).sum(0).unbind(0)
    return mean, var + ((gathered[:, 0] - mean).square_() * shares[:, 0]).sum(0)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, running: Following | None, holders: Holders) -> Tensor:
        mean, var = _combined(own.contiguous(), holders)
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
        mean, var = _combined(moments, holders)
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
