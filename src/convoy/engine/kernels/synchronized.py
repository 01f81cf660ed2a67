"""Batch norm over samples, rows and columns that several ranks hold together."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from convoy.comm.collectives import all_gather, all_reduce
from convoy.engine.statistics import Term


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


def normalize_together(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, holders: Holders
) -> tuple[Tensor, Term]:
    """Normalize by the mean and variance over all ranks.

    Args:
        x: [samples, channels, ...], this rank's part, perhaps without samples.
        weight, bias: [channels] or None.
        eps: added to the variance.
        holders: the ranks that have the other parts.

    Returns:
        This rank's part of the result, and mean and unbiased variance.
    """
    y, mean, var = _BatchNorm.apply(x, weight, bias, eps, holders)
    return y, (mean, var * (holders.total / max(1, holders.total - 1)))


class _BatchNorm(torch.autograd.Function):
    """Forward: ranks exchange mean and variance of what they have and combine them (Chan, Golub and LeVeque, 1979), so
    that nothing is computed as a small difference of large numbers. Backward: they add up the sums of the gradient and
    of its product with the normalized input. What runs over x are torch's own batch norm loops.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, holders: Holders
    ) -> tuple[Tensor, Tensor, Tensor]:
        gathered = all_gather(_statistics(x, weight), holders.group)
        shares = gathered.new_tensor([count / holders.total for count in holders.counts])[:, None, None]
        mean, var = (gathered * shares).sum(0).unbind(0)
        var = var + ((gathered[:, 0] - mean).square_() * shares[:, 0]).sum(0)
        y = torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]
        ctx.save_for_backward(x, weight, mean, var)
        ctx.eps, ctx.holders = eps, holders
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        x, weight, mean, var = ctx.saved_tensors
        inverse = (var + ctx.eps).rsqrt()
        if gradient.stride() != x.stride():
            gradient = torch.empty_like(x, dtype=gradient.dtype).copy_(gradient)
        slope, total = _sums(gradient, x, mean, var, inverse, ctx.eps)
        dx = None
        if ctx.needs_input_grad[0]:
            slope_mean, mean_gradient = (
                all_reduce(torch.stack([slope, total]), ctx.holders.group) / ctx.holders.total
            ).unbind(0)
            scale = inverse if weight is None else inverse * weight
            # dx = scale · (dy − mean_gradient − x̂ · slope_mean): the last two terms first, again as a batch norm of x
            dx = torch.native_batch_norm(
                x, -scale * slope_mean, -scale * mean_gradient, mean, var, False, 0.0, ctx.eps
            )[0]
            dx.addcmul_(gradient, scale.to(dx.dtype).view(-1, *[1] * (x.dim() - 2)))
        needed = ctx.needs_input_grad
        return dx, slope if needed[1] else None, total if needed[2] else None, None, None


def _statistics(x: Tensor, weight: Tensor | None) -> Tensor:
    """Mean and variance of each channel: [2, channels]."""
    dtype = x.dtype if weight is None else weight.dtype
    channels = x.shape[1]
    if x.numel() == 0:
        return torch.zeros(2, channels, dtype=dtype, device=x.device)
    unused = torch.zeros(2, channels, dtype=dtype, device=x.device)  # they only say the type
    return torch.stack(torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0))


def _sums(gradient: Tensor, x: Tensor, mean: Tensor, var: Tensor, inverse: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Sum over all samples of the gradient times the normalized input, and of the gradient: [channels] each."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    found = torch.ops.aten.native_batch_norm_backward(
        gradient, x, None, mean, var, mean, inverse, False, eps, [False, True, True]
    )
    return found[1], found[2]
