"""Normalization where several ranks hold parts of what is normalized together."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from convoy.comm.collectives import all_gather, all_reduce
from convoy.ops.statistics import Term


@dataclass(frozen=True)
class Sharing:
    """How groups of channels lie over ranks.

    Attributes:
        group: the ranks that have parts of the same samples.
        membership: for each of this rank's channels, the group that it belongs to.
        shares: for each rank and group, which share of the group's elements the rank has.
        total: elements of a group on all ranks.
    """

    group: ProcessGroup
    membership: tuple[int, ...]
    shares: tuple[tuple[float, ...], ...]
    total: int

    def add_up(self, x: Tensor) -> Tensor:
        """Add up the channels of each group: [..., channels] to [..., groups]."""
        groups = len(self.shares[0])
        if groups == 1:
            return x.sum(-1, keepdim=True)
        return x.new_zeros(*x.shape[:-1], groups).index_add_(-1, self._index(x), x)

    def spread(self, x: Tensor) -> Tensor:
        """Give each channel the number of its group: [..., groups] to [..., channels, 1]."""
        if len(self.shares[0]) > 1:
            x = x.index_select(-1, self._index(x))
        return x[..., None]

    def _index(self, x: Tensor) -> Tensor:
        return torch.tensor(self.membership, dtype=torch.int64, device=x.device)


class Normalize(torch.autograd.Function):
    """(x − mean) / √(variance + eps), over groups of channels that several ranks hold together.

    Ranks exchange mean and mean square deviation of what they have and combine them (Chan, Golub and LeVeque, 1979):
    nothing is computed as a small difference of large numbers. The backward pass adds up two numbers for each group.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharing: Sharing, eps: float) -> Tensor:
        """`x` [samples, channels, elements], this rank's part."""
        wide = x if x.dtype == torch.float64 else x.float()
        gathered = all_gather(_statistics(wide, sharing), sharing.group)
        means, squares = gathered.unbind(1)
        shares = wide.new_tensor(sharing.shares)[:, None]
        mean = (means * shares).sum(0)
        variance = ((squares + (means - mean).square()) * shares).sum(0)
        inverse = (variance + eps).rsqrt()
        y = ((wide - sharing.spread(mean)) * sharing.spread(inverse)).to(x.dtype)
        ctx.save_for_backward(y, inverse)
        ctx.sharing = sharing
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """dx = (dy − mean(dy) − y·mean(dy·y)) / √(variance + eps)."""
        y, inverse = ctx.saved_tensors
        sharing: Sharing = ctx.sharing
        wide = gradient.to(inverse.dtype)
        sums = sharing.add_up(torch.stack([wide.sum(2), (wide * y).sum(2)]))
        mean, slope = (all_reduce(sums, sharing.group) / sharing.total).unbind(0)
        dx = (wide - sharing.spread(mean) - y * sharing.spread(slope)) * sharing.spread(inverse)
        return dx.to(y.dtype), None, None


def _statistics(x: Tensor, sharing: Sharing) -> Tensor:
    """Mean and mean square deviation of this rank's part of each group: [2, samples, groups]."""
    samples, channels, elements = x.shape
    if channels == 0 or elements == 0:
        return x.new_zeros(2, samples, len(sharing.shares[0]))
    counts = sharing.add_up(x.new_ones(channels)).clamp_(min=1)
    mean = sharing.add_up(x.mean(2)) / counts
    squares = sharing.add_up((x - sharing.spread(mean)).square_().mean(2)) / counts
    return torch.stack([mean, squares])


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, view: tuple[int, ...]) -> Tensor:
    """Scale and shift by numbers that broadcast in the shape `view`; the type stays that of `y`."""
    dtype = y.dtype
    y = y if weight is None else y * weight.view(view)
    y = y if bias is None else y + bias.view(view)
    return y.to(dtype)


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
        gathered = all_gather(_channel_statistics(x, weight), holders.group)
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
        slope, total = _gradient_sums(gradient, x, mean, var, inverse, ctx.eps)
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


def _channel_statistics(x: Tensor, weight: Tensor | None) -> Tensor:
    """Mean and variance of each channel: [2, channels]."""
    dtype = x.dtype if weight is None else weight.dtype
    channels = x.shape[1]
    if x.numel() == 0:
        return torch.zeros(2, channels, dtype=dtype, device=x.device)
    unused = torch.zeros(2, channels, dtype=dtype, device=x.device)  # they only say the type
    return torch.stack(torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0))


def _gradient_sums(
    gradient: Tensor, x: Tensor, mean: Tensor, var: Tensor, inverse: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Sum over all samples of the gradient times the normalized input, and of the gradient: [channels] each."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    found = torch.ops.aten.native_batch_norm_backward(
        gradient, x, None, mean, var, mean, inverse, False, eps, [False, True, True]
    )
    return found[1], found[2]
