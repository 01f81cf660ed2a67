"""Batch norm: moments, an exchange where several ranks hold parts of the same channels, normalization; backward the
sums of the gradient, their exchange, and the input's gradient.

Ranks combine their moments by the formula of Chan, Golub and LeVeque (1979), so that nothing is computed as a small
difference of large numbers. On a CPU torch's own loops of the plain layer run over the activations, one microbatch
after the other, which keeps each in the caches. On a GPU that would be a launch of every kernel for each of them, and
torch's loops crash without a weight and refuse a rank without samples; there all run at once, and with the ReLU and
addition that follow: by Triton (`batch_norm_kernels.py`) where it is installed, as it is beside torch for CUDA on
Linux, otherwise by a few of torch's own operations (`batch_norm_torch.py`). An update of ResNet-50, recorded as a CUDA
graph, takes 40.9 ms on an H200 with these kernels, with torch's 53.1.
"""

import math
from collections.abc import Callable, Iterable, Sequence
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
from convoy.ops import batch_norm_torch
from convoy.ops.batch_norm_torch import Norm, Saved, ended, fits
from convoy.ops.constants import Constants
from convoy.ops.context import exchanged
from convoy.ops.gpu import is_watched, triton_kernels
from convoy.ops.kernel import Site
from convoy.ops.statistics import Running, add_term
from convoy.plans.mesh import Axes


@dataclass(frozen=True)
class Holders:
    """The ranks that hold parts of the same numbers. How many every rank has is known from the plan, so that a GPU's
    host never waits."""

    group: ProcessGroup
    counts: tuple[int, ...]  # by rank, of those numbers that have a mean together, such as a channel's

    @classmethod
    def of(cls, site: Site, axes: Axes, dims: Iterable[int], factor: int = 1) -> "Holders | None":
        """Those along some axes of a call's input, of numbers along `dims`; None where a rank has all."""
        group, name = site.groups.of(axes), site.call.attributes["input"]
        if group is None:
            return None
        shape, dims = site.graph.shape(name), tuple(dims)
        places = site.mesh.group(site.coordinates, axes)
        parts = ((site.layouts[name].parts(dim, site.mesh, place, shape[dim]) for dim in dims) for place in places)
        return cls(group, tuple(factor * math.prod(map(len, parts_of_rank)) for parts_of_rank in parts))

    @property
    def total(self) -> int:
        return sum(self.counts)

    @cached_property
    def shares(self) -> Constants:
        """Each rank's share of the total: [ranks]."""
        return Constants([count / self.total for count in self.counts])

    def times(self, samples: int) -> "Holders":
        """The same where `counts` are those of one sample."""
        return Holders(self.group, tuple(samples * count for count in self.counts))

    def combined(self, local_moments: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and mean square deviation of what all have from those of this rank's part: [2, ...]."""
        gathered = exchanged(all_gather, local_moments, self.group)
        shares = self.shares.like(gathered).view(-1, *[1] * local_moments.dim())
        mean, var = (gathered * shares).sum(0).unbind(0)
        return mean, var + ((gathered[:, 0] - mean).square_() * shares[:, 0]).sum(0)


def at_once(x: Tensor) -> bool:
    """Whether several microbatches are faster in one go than one after the other."""
    return x.device.type == "cuda"


def by_kernels(x: Tensor) -> bool:
    """Whether Convoy's own kernels run: a compiler makes better ones of torch's operations."""
    return at_once(x) and not torch.compiler.is_compiling()


def normalize(x: Tensor, norm: Norm, running: Running | None, holders: Holders | None = None) -> Tensor:
    """This rank's part, [samples, channels, ...], normalized by the mean and variance over all ranks, and the running
    statistics brought up to date."""
    if by_kernels(x):
        if holders is None:
            _refuse_single(x, len(x))
        return _fused(x, norm, (len(x),), running, holders)[0]
    if holders is not None:
        return ended(_OnCpu.apply(x, norm.weight, norm.bias, running, norm.eps, holders), norm)
    mean, var, momentum = (None, None, 0.0) if running is None else (running.mean, running.var, running.weight)
    return ended(F.batch_norm(x, mean, var, norm.weight, norm.bias, True, momentum, norm.eps), norm)


def normalize_each(
    x: Tensor, norm: Norm, sizes: Sequence[int], holders: Holders | None = None
) -> tuple[Tensor, Tensor]:
    """Normalize every microbatch of [samples, channels, ...] by its own mean and variance; `holders` have parts of
    each, and count the numbers of one sample. The second result is the terms of the running statistics: mean and
    unbiased variance, [microbatches, 2, channels]. A microbatch with one value of each channel has no variance and is
    refused with torch's ValueError."""
    if at_once(x) and holders is None and (by_kernels(x) or len(sizes) > 1):
        _refuse_single(x, min(sizes))
        if by_kernels(x):
            return _fused(x, norm, tuple(sizes), None, None)
        y, _, terms = batch_norm_torch.normalize(x, batch_norm_torch.moments(x, sizes), norm, None, sizes)
        return y, terms.detach()
    results, bare_norm = [], Norm(norm.weight, norm.bias, None, norm.eps, False)
    terms = torch.zeros(len(sizes), 2, x.shape[1], dtype=_type(x, norm.weight), device=x.device)
    for part, (mean, var) in zip(x.split(sizes) if len(sizes) > 1 else [x], terms, strict=True):
        term = Running(mean, var, momentum=1.0)
        results.append(normalize(part, bare_norm, term, None if holders is None else holders.times(len(part))))
    return ended(results[0] if len(results) == 1 else torch.cat(results), norm), terms


def _refuse_single(x: Tensor, samples: int) -> None:
    """As torch does: one value of a channel has no variance."""
    if samples * math.prod(x.shape[2:]) < 2:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")


def _type(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """The type in which torch's loops give mean and variance."""
    return (x if weight is None else weight).dtype


class _OnCpu(torch.autograd.Function):
    """Batch norm over several ranks by the loops of torch's plain layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: Running | None,
        eps: float,
        holders: Holders,
    ) -> Tensor:
        moments = unused = torch.zeros(2, x.shape[1], dtype=_type(x, weight), device=x.device)
        if x.numel():
            moments = torch.stack(torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0))  # they only say the type
        mean, var = holders.combined(moments)
        if running is not None:
            term = mean, var * (holders.total / max(1, holders.total - 1))
            add_term([running.mean, running.var], term, [running.weight] * 2)
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
        gradient, inverse = _arranged_as(x, gradient), (var + ctx.eps).rsqrt()
        slope, shift = torch.zeros_like(mean), torch.zeros_like(mean)
        if x.numel():
            _, slope, shift = torch.ops.aten.native_batch_norm_backward(
                gradient, x, None, mean, var, mean, inverse, False, ctx.eps, [False, True, True]
            )
        needs_gradient, dx = ctx.needs_input_grad, None
        if needs_gradient[0]:
            sums = all_reduce(torch.stack([slope, shift]), ctx.holders.group)
            dx = gradient
        if needs_gradient[0] and x.numel():
            slope_mean, mean_gradient = (sums / ctx.holders.total).unbind(0)
            scale = inverse if weight is None else inverse * weight
            wide = x.to(scale.dtype)  # so that low precision is rounded to once
            # the last two terms first, again as a batch norm of x
            numbers = -scale * slope_mean, -scale * mean_gradient, mean, var
            dx = torch.native_batch_norm(wide, *numbers, False, 0.0, ctx.eps)[0]
            dx.addcmul_(gradient.to(dx.dtype), scale.view(-1, *[1] * (x.dim() - 2)))
            dx = dx.to(x.dtype)
        _, of_weight, of_bias, *_ = needs_gradient
        return dx, slope if of_weight else None, shift if of_bias else None, None, None, None


def _fused(
    x: Tensor, norm: Norm, sizes: tuple[int, ...], running: Running | None, holders: Holders | None
) -> tuple[Tensor, Tensor]:
    """The result of all microbatches at once, and without `holders` their terms of the running statistics."""
    is_inside = fits(norm.residual, x)
    kernel_norm = norm if is_inside else norm._replace(residual=None, relu=False)
    y, terms = _Fused.apply(x, *kernel_norm[:3], (norm.eps, kernel_norm.relu, sizes, running, holders))
    return y if is_inside else ended(y, norm), terms


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, settings: Any
    ) -> tuple[Tensor, Tensor | None]:
        eps, relu, sizes, running, holders = settings
        x, moments = _arranged(x), None  # computed where it is one operation
        if holders is not None:
            moments = exchanged(all_gather, _run("moments", x, sizes)[0], holders.group)
        norm = Norm(weight, bias, None if residual is None else _arranged_as(x, residual), eps, relu)
        buffers = (None,) * 4 if running is None else running.buffers
        y, statistics, terms = _run("normalize", x, moments, *norm, *buffers, sizes)
        ctx.save_for_backward(x, y if relu and residual is not None else None, weight, bias, statistics)
        ctx.sizes, ctx.relu, ctx.holders = sizes, relu and residual is None, holders
        if holders is not None:
            return y, None
        ctx.mark_non_differentiable(terms)
        ctx.set_materialize_grads(False)  # that of the terms would be zeros
        return y, terms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, _: None) -> Any:
        """dx = weight / √(variance + eps) · (dy − mean(dy) − x̂ · mean(dy · x̂)); the gradients of weight and bias."""
        if dy is None:
            return (None,) * 5
        saved = Saved._make([*ctx.saved_tensors, ctx.sizes, ctx.relu])
        dy, needs_gradient, holders = _arranged_as(saved.x, dy), ctx.needs_input_grad, ctx.holders
        dx = None
        if holders is None:
            dx, local_sums, masked = _run("normalize_backward", dy, *saved)
        else:
            sums, local_sums, masked = _run("gradient_sums", dy, *saved)
        shift, slope = (local_sums[0] if len(local_sums) == 1 else local_sums.sum(0)).unbind(0)
        dy = dy if saved.y is None else masked  # behind the ReLU the gradient is that of both terms of the sum
        if holders is not None and needs_gradient[0]:
            dx = _run("input_gradient", dy, *saved, all_reduce(sums, holders.group), holders.total)
        results = zip((dx, slope, shift, dy), needs_gradient[:4], strict=True)
        return *(result if is_needed else None for result, is_needed in results), None


def _arranged(x: Tensor) -> Tensor:
    """`x` with the channels either innermost in memory or right outside of rows and columns."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    is_arranged = x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])
    return x if is_arranged else x.contiguous()


def _arranged_as(x: Tensor, gradient: Tensor) -> Tensor:
    """A gradient in the order of memory of `x`."""
    return gradient if gradient.stride() == x.stride() else torch.empty_like(x, dtype=gradient.dtype).copy_(gradient)


def batch_norm_kernels(x: Tensor) -> ModuleType | None:
    """The kernels of Triton, where they run."""
    return triton_kernels("batch_norm_kernels", "batch norm", x)


def _operations(way: Callable[[Tensor], Any]) -> dict[str, Callable[..., Any]]:
    """The functions of torch's or of Triton's way, with the fields of `Norm`, `Running` and `Saved` one by one, as
    torch's operations take them; of microbatches both steps of the way, forward or backward, are one."""

    def moments(x: Tensor, sizes: Sequence[int]) -> Any:
        return (way(x) if x.numel() else batch_norm_torch).moments(x, sizes)

    def normalize(x: Tensor, moments_of_ranks: Tensor | None, *flat: Any) -> Any:
        norm, buffers, sizes = Norm(*flat[:5]), flat[5:9], flat[9]
        running = None if buffers[0] is None else Running(*buffers)
        is_alone = moments_of_ranks is None
        return way(x).normalize(x, moments(x, sizes) if is_alone else moments_of_ranks, norm, running, sizes, is_alone)

    def gradient_sums(gradient: Tensor, *saved: Any, copies: bool = True) -> Any:
        return (way(gradient) if gradient.numel() else batch_norm_torch).gradient_sums(gradient, Saved(*saved), copies)

    def input_gradient(gradient: Tensor, *rest: Any) -> Any:
        *saved, sums, total = rest
        functions = way(gradient) if gradient.numel() else batch_norm_torch
        return functions.input_gradient(gradient, Saved(*saved), sums, total)

    def normalize_backward(gradient: Tensor, *saved: Any) -> Any:
        sums, _, masked = gradient_sums(gradient, *saved, copies=False)
        return input_gradient(gradient if saved[1] is None else masked, *saved, sums, None), sums, masked

    return {f.__name__: f for f in (moments, normalize, gradient_sums, input_gradient, normalize_backward)}


_SAVED = "Tensor gradient, Tensor x, Tensor? y, Tensor? weight, Tensor? bias, Tensor statistics, int[] sizes, bool relu"
_SCHEMAS = {
    "moments": "(Tensor x, int[] sizes) -> Tensor",
    "normalize": "(Tensor x, Tensor? moments, Tensor? weight, Tensor? bias, Tensor? residual, float eps, bool relu, "
    "Tensor(a!)? running_mean, Tensor(b!)? running_var, float? momentum, Tensor? count, int[] sizes) "
    "-> (Tensor, Tensor, Tensor)",
    "gradient_sums": f"({_SAVED}) -> (Tensor, Tensor, Tensor)",
    "input_gradient": f"({_SAVED}, Tensor sums, int? total) -> Tensor",
    "normalize_backward": f"({_SAVED}) -> (Tensor, Tensor, Tensor)",
}
_FUNCTIONS = _operations(lambda x: batch_norm_kernels(x) or batch_norm_torch)
for _name, _shapes in _operations(lambda x: batch_norm_torch).items():
    torch.library.define(f"convoy::{_name}", _SCHEMAS[_name])
    torch.library.impl(f"convoy::{_name}", "default", _FUNCTIONS[_name])
    torch.library.register_fake(f"convoy::{_name}", _shapes)


def _run(operation: str, x: Tensor, *rest: Any) -> Any:
    return (getattr(torch.ops.convoy, operation) if is_watched(x) else _FUNCTIONS[operation])(x, *rest)
