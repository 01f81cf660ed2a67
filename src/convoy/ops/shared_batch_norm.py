"""Batch norm of channels of which several ranks hold parts.

Ranks exchange mean and variance of what they have and combine them (Chan, Golub and LeVeque, 1979), so that nothing is
computed as a small difference of large numbers. In the backward pass they add up two sums for each channel. What runs
over the activations are torch's own loops: on CUDA the five functions that its SyncBatchNorm is made of, elsewhere
those of the plain layer. How many numbers every rank has is known from the plan, so that a GPU's host never waits.
"""

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from convoy.comm.collectives import all_gather, all_reduce
from convoy.ops.constants import Constants
from convoy.ops.context import exchanged
from convoy.ops.microbatch_norm import arranged, wide_type
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

    @functools.cached_property
    def shares(self) -> Constants:
        """Which share of them each rank has: [ranks]."""
        return Constants([count / self.total for count in self.counts])

    @functools.cached_property
    def holding(self) -> Constants | None:
        """The ranks that have any; None where all have."""
        return None if all(self.counts) else Constants([rank for rank, count in enumerate(self.counts) if count])

    @functools.cached_property
    def held(self) -> Constants:
        """How many these have."""
        return Constants([count for count in self.counts if count])


@dataclass(frozen=True)
class Following:
    """Running mean and variance, [channels] each, which a pass brings up to date; and its weight in them."""

    mean: Tensor
    var: Tensor
    momentum: float

    def follow(self, mean: Tensor, var: Tensor, total: int) -> None:
        """Add the mean and the biased variance of `total` numbers of each channel."""
        add_term([self.mean, self.var], (mean, var * (total / max(1, total - 1))), [self.momentum] * 2)


def normalize_together(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Following | None, eps: float, holders: Holders
) -> Tensor:
    """Normalize by the mean and variance over all ranks: this rank's part of the result.

    Args:
        x: [samples, channels, ...], this rank's part, perhaps without samples.
        weight, bias: [channels] or None.
        running: brought up to date; None where nobody keeps them.
        eps: added to the variance.
        holders: the ranks that have the other parts.
    """
    result: Tensor = _BatchNorm.apply(x, weight, bias, running, eps, holders)
    return result


class _BatchNorm(torch.autograd.Function):
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
        loops = _loops(x)
        x = loops.arranged(x)
        own = loops.statistics(x, weight, eps) if x.numel() else loops.nothing(x, weight)
        mean, spread = loops.combine(exchanged(all_gather, own, holders.group), holders, running, eps)
        ctx.save_for_backward(x, weight, mean, spread)
        ctx.eps, ctx.holders = eps, holders
        return loops.normalize(x, weight, bias, mean, spread, eps) if x.numel() else torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, mean, spread = ctx.saved_tensors
        loops, eps, holders, needed = _loops(x), ctx.eps, ctx.holders, ctx.needs_input_grad
        if gradient.stride() != x.stride():
            gradient = torch.empty_like(x, dtype=gradient.dtype).copy_(gradient)
        if x.numel():
            sums, slope, shift = loops.gradient_sums(gradient, x, weight, mean, spread, eps)
        else:
            sums = loops.nothing(x, weight)
            slope, shift = torch.zeros_like(sums).unbind(0)
        dx = None
        if needed[0]:
            sums = all_reduce(sums, holders.group)
            dx = loops.input_gradient(gradient, x, weight, mean, spread, sums, eps, holders) if x.numel() else gradient
        return dx, slope if needed[1] else None, shift if needed[2] else None, None, None, None


class _Loops(Protocol):
    """What batch norm computes on a kind of device.

    `spread` is the variance of each channel where torch's loops take that, and 1 / √(variance + eps) where they take
    this.
    """

    def arranged(self, x: Tensor) -> Tensor:
        """`x` in an order of memory that the loops can take."""

    def nothing(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Statistics, or sums, of a part without samples: [2, channels]."""

    def statistics(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Mean and spread of this rank's part: [2, channels]."""

    def combine(
        self, gathered: Tensor, holders: Holders, running: Following | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Mean and spread of all parts, [channels] each, from those of the ranks, [ranks, 2, channels]."""

    def normalize(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, spread: Tensor, eps: float
    ) -> Tensor:
        """This rank's part of the result."""

    def gradient_sums(
        self, gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, spread: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Over this rank's part: the two sums that `input_gradient` needs of all ranks, [2, channels]; the gradients
        of weight and bias."""

    def input_gradient(
        self,
        gradient: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        spread: Tensor,
        sums: Tensor,
        eps: float,
        holders: Holders,
    ) -> Tensor:
        """dx = weight / √(variance + eps) · (dy − mean(dy) − x̂ · mean(dy · x̂)), the means over all ranks."""


class _PlainLoops:
    """By the loops of the plain layer; the spread is the variance."""

    def arranged(self, x: Tensor) -> Tensor:
        return x

    def nothing(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return torch.zeros(2, x.shape[1], dtype=(x if weight is None else weight).dtype, device=x.device)

    def statistics(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        unused = self.nothing(x, weight)  # they only say the type
        return torch.stack(torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0))

    def combine(
        self, gathered: Tensor, holders: Holders, running: Following | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        shares = holders.shares.like(gathered)[:, None, None]
        mean, var = (gathered * shares).sum(0).unbind(0)
        var = var + ((gathered[:, 0] - mean).square_() * shares[:, 0]).sum(0)
        if running is not None:
            running.follow(mean, var, holders.total)
        return mean, var

    def normalize(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, spread: Tensor, eps: float
    ) -> Tensor:
        return torch.native_batch_norm(x, weight, bias, mean, spread, False, 0.0, eps)[0]

    def gradient_sums(
        self, gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, spread: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        inverse = (spread + eps).rsqrt()
        _, slope, total = torch.ops.aten.native_batch_norm_backward(
            gradient, x, None, mean, spread, mean, inverse, False, eps, [False, True, True]
        )
        return torch.stack([slope, total]), slope, total

    def input_gradient(
        self,
        gradient: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        spread: Tensor,
        sums: Tensor,
        eps: float,
        holders: Holders,
    ) -> Tensor:
        slope_mean, mean_gradient = (sums / holders.total).unbind(0)
        inverse = (spread + eps).rsqrt()
        scale = inverse if weight is None else inverse * weight
        wide = x.to(scale.dtype)  # so that low precision is rounded to once
        # the last two terms first, again as a batch norm of x
        dx = torch.native_batch_norm(wide, -scale * slope_mean, -scale * mean_gradient, mean, spread, False, 0.0, eps)[
            0
        ]
        dx.addcmul_(gradient.to(dx.dtype), scale.view(-1, *[1] * (x.dim() - 2)))
        return dx.to(x.dtype)


class _CudaLoops:
    """By the five functions of torch's SyncBatchNorm, which are there on CUDA alone; the spread is 1 / √(var + eps).

    They compute in float32 at least, and round to the type of x once. Beside low precision they take a weight in
    float32. They take nothing empty, and no rank's statistics over nothing.
    """

    def arranged(self, x: Tensor) -> Tensor:
        return arranged(x)

    def nothing(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return torch.zeros(2, x.shape[1], dtype=wide_type(x.dtype), device=x.device)

    def statistics(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return torch.stack(torch.batch_norm_stats(x, eps))

    def combine(
        self, gathered: Tensor, holders: Holders, running: Following | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        if holders.holding is not None:
            gathered = gathered.index_select(0, holders.holding.like(gathered, torch.int64))
        means, inverses = gathered.unbind(1)
        # the counts must be in the type of the running statistics, and low precision cannot count
        here = running if running is not None and running.mean.dtype == gathered.dtype else None
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            means,  # in place of x: the type alone counts
            means,
            inverses,
            None if here is None else here.mean,
            None if here is None else here.var,
            0.0 if here is None else here.momentum,
            eps,
            holders.held.like(gathered),
        )
        if running is not None and here is None:
            running.follow(mean, inverse.square().reciprocal_().sub_(eps), holders.total)
        return mean, inverse

    def normalize(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, spread: Tensor, eps: float
    ) -> Tensor:
        weight, bias = (None if one is None else one.to(mean.dtype) for one in (weight, bias))
        return torch.batch_norm_elemt(x, weight, bias, mean, spread, eps)

    def gradient_sums(
        self, gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, spread: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        weight = None if weight is None else weight.to(mean.dtype)
        scaled = weight is not None  # the gradients of weight and bias are made in the likeness of the weight
        total, product, slope, shift = torch.batch_norm_backward_reduce(
            gradient, x, mean, spread, weight, True, scaled, scaled
        )
        return torch.stack([total, product]), slope if scaled else product * spread, shift if scaled else total

    def input_gradient(
        self,
        gradient: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        spread: Tensor,
        sums: Tensor,
        eps: float,
        holders: Holders,
    ) -> Tensor:
        weight = None if weight is None else weight.to(mean.dtype)
        total, product = sums.unbind(0)
        counts = holders.held.like(x, torch.int32)
        return torch.batch_norm_backward_elemt(gradient, x, mean, spread, weight, total, product, counts)


_LOOPS: dict[str, _Loops] = {"cuda": _CudaLoops()}
_PLAIN_LOOPS = _PlainLoops()


def _loops(x: Tensor) -> _Loops:
    return _LOOPS.get(x.device.type, _PLAIN_LOOPS)
