"""Normalization where several ranks hold parts of what is normalized together."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from convoy.comm.collectives import all_gather, all_reduce
from convoy.ops.constants import Constants
from convoy.ops.context import exchanged


@dataclass(frozen=True)
class Sharing:
    """How groups of channels lie over ranks."""

    group: ProcessGroup  # the ranks that have parts of the same samples
    membership: tuple[int, ...]  # the group of each of this rank's channels
    shares: tuple[tuple[float, ...], ...]  # by rank and group: the rank's share of the group's elements
    total: int  # elements of a group on all ranks

    def add_up(self, x: Tensor) -> Tensor:
        """Add up the channels of each group: [..., channels] to [..., groups]."""
        groups = len(self.shares[0])
        if groups == 1:
            return x.sum(-1, keepdim=True)
        return x.new_zeros(*x.shape[:-1], groups).index_add_(-1, self._index.like(x, torch.int64), x)

    def spread(self, x: Tensor) -> Tensor:
        """Give each channel the number of its group: [..., groups] to [..., channels, 1]."""
        if len(self.shares[0]) > 1:
            x = x.index_select(-1, self._index.like(x, torch.int64))
        return x[..., None]

    @functools.cached_property
    def rank_shares(self) -> Constants:
        return Constants(self.shares)

    @functools.cached_property
    def _index(self) -> Constants:
        return Constants(self.membership)


class Normalize(torch.autograd.Function):
    """(x − mean) / √(variance + eps), over groups of channels that several ranks hold together.

    Ranks exchange mean and mean square deviation of what they have and combine them (Chan, Golub and LeVeque, 1979):
    nothing is computed as a small difference of large numbers. The backward pass adds up two numbers for each group.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharing: Sharing, eps: float) -> Tensor:
        """`x` [samples, channels, elements], this rank's part."""
        wide = x if x.dtype == torch.float64 else x.float()
        gathered = exchanged(all_gather, _statistics(wide, sharing), sharing.group)
        means, squares = gathered.unbind(1)
        shares = sharing.rank_shares.like(wide)[:, None]
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
