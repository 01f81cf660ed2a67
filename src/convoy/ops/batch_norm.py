"""Batch norm of what a rank has: moments, an exchange where several ranks hold parts of the same channels,
normalization; backward the sums of the gradient, their exchange, and the input's gradient.

Ranks combine their moments by the formula of Chan, Golub and LeVeque (1979), so that nothing is computed as a small
difference of large numbers. On a CPU torch's own loops of the plain layer run over the activations, one microbatch
after the other, which keeps each in the caches. On a GPU that would be a launch of every kernel for each of them, and
torch's loops crash without a weight and refuse a rank without samples; there all run at once, and with the ReLU and
addition that follow: by Triton (`batch_norm_kernels.py`) where it is installed, as it is beside torch for CUDA on
Linux, otherwise by a few of torch's own operations (`batch_norm_torch.py`). An update of ResNet-50, recorded as a CUDA
graph, takes 40.9 ms on an H200 with these kernels, with torch's 53.1.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from convoy.comm.collectives import all_gather, all_reduce
from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Graph, Recognized, TorchCall
from convoy.ops import batch_norm_torch
from convoy.ops.batch_norm_torch import Norm, Saved, ended, fits
from convoy.ops.context import exchanged
from convoy.ops.gpu import triton_kernels
from convoy.ops.kernel import Holders, Kernel, NotCompiled, Part, Site, WithStatistics, by_role
from convoy.ops.layouts import by_channel
from convoy.ops.norms import affine
from convoy.ops.operation import Operation, keeps_input
from convoy.ops.statistics import Running, add_term, follow_at_once, joined
from convoy.plans.layout import Layout
from convoy.plans.mesh import Axes


def _batch_norm(call: TorchCall) -> Recognized:
    arguments = call.bound(
        input=None, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    )
    updates = bool(arguments["training"] and arguments["running_mean"])
    owner = str(arguments["running_mean"]).rpartition(".")[0]
    counter = next((name for name in call.updates if updates and name.rpartition(".")[0] == owner), None)
    if counter and arguments["momentum"] == 1.0 and getattr(call.module, "momentum", 0) is None:  # it is 1 / count
        arguments["momentum"] = None
    return Recognized("batch_norm", {**arguments, "num_batches_tracked": counter}, updates=updates)


ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def _build(site: Site) -> Kernel:
    """The kernel by running statistics in evaluation, otherwise as the context's mode says."""
    attributes, names = site.call.attributes, site.call.inputs
    layer, pick = _Layer(site), by_role(site.call, *ARGUMENTS)

    def call(run: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
        x, weight, bias, *buffers = pick(tensors)
        residual = None if site.addend is None else tensors[len(names)]
        return run(x, Norm(weight, bias, residual, layer.eps, site.relu), buffers)

    def whole(run: Callable[..., Tensor]) -> Kernel:
        return lambda *tensors: [call(run, tensors)]

    if not attributes["training"]:
        return whole(layer.by_running_statistics)
    if not site.graph.training or site.context.batch_norm == "sync":
        return NotCompiled(whole(layer.by_whole_pass))
    buffers = tuple(names.index(attributes[name]) for name in ARGUMENTS[3:] if attributes[name] is not None)
    kernel = WithStatistics(lambda *tensors: call(layer.by_own_samples, tensors), layer.record, buffers)
    return kernel if layer.own is None else NotCompiled(kernel)


def _nothing(x: Tensor, norm: Norm) -> Tensor:
    """A result without elements; scale and shift get a gradient of zero, and what is added is one of its inputs, so
    that its backward pass runs on every rank."""
    return ended(affine(x.clone(), norm.weight, norm.bias, (-1, *[1] * (x.dim() - 2))), norm._replace(relu=False))


class _Division(NamedTuple):
    """Who has the microbatches of a pass."""

    owners: tuple[int, ...]  # the rank that has each microbatch
    sizes: tuple[int, ...]  # samples in each of this rank's microbatches


Buffers = Sequence[Tensor | None]  # running mean, running variance, counter; None where the layer keeps none


class _Layer:
    """The computation of a layer in each mode."""

    def __init__(self, site: Site) -> None:
        attributes = site.call.attributes
        self.site = site
        self.source: str = attributes["input"]
        self.eps: float = attributes["eps"]
        self.momentum: float | None = attributes["momentum"]
        self.name: str = attributes["running_mean"] or site.call.name
        self.shape = site.graph.shape(self.source)
        layout = site.layouts[self.source]
        samples = layout.split(0)
        self.sample_axes: Axes = samples.axes if samples else ()
        other_axes = tuple(sorted(axis for dim, split in layout.splits if dim > 1 for axis in split.axes))
        self.in_turns = site.context.in_turns and not site.graph.training and attributes["running_mean"] is None
        divided_axes = tuple(sorted({*self.sample_axes, *other_axes}))
        dims = range(2, len(self.shape))
        self.passing = Holders.of(site, other_axes if self.in_turns else divided_axes, (0, *dims))
        self.own = Holders.of(site, other_axes, dims)
        self._divisions: dict[tuple[int, ...], _Division] = {}

    def by_running_statistics(self, x: Tensor, norm: Norm, buffers: Buffers) -> Tensor:
        if x.shape[1] == 0:  # torch's functions refuse tensors without channels
            return _nothing(x, norm)
        y = F.batch_norm(x, buffers[0], buffers[1], norm.weight, norm.bias, False, 0.0, self.eps)
        return ended(y, norm)

    def by_whole_pass(self, x: Tensor, norm: Norm, buffers: Buffers) -> Tensor:
        """Normalize over the samples, rows and columns of all ranks."""
        running = self._running(buffers)
        if x.shape[1] == 0 or self.shape[0] == 0 or (self.in_turns and len(x) == 0):  # nothing to take statistics of
            return _nothing(x, norm)
        return normalize(x, norm, running, self.passing)

    def by_own_samples(self, x: Tensor, norm: Norm, buffers: Buffers) -> tuple[Tensor, list[Tensor]]:
        """Normalize over each microbatch, all of whose samples one rank has, or over all samples of this rank:
        approximate, as the result depends on how many ranks there are. For the latter a GPU updates the running
        statistics in the same launch."""
        context = self.site.context
        by_microbatch = context.batch_norm == "microbatch"
        sizes = self._division().sizes if by_microbatch else (len(x),)
        if x.shape[1] == 0 or len(x) == 0:
            return _nothing(x, norm), []
        mean, var, _ = buffers
        is_one_launch = not by_microbatch and self.own is None and by_kernels(x) and context.recording
        if is_one_launch and mean is not None and var is not None and self.momentum is not None:
            return normalize(x, norm, Running(mean, var, self.momentum)), []
        y, terms = normalize_each(x, norm, sizes, self.own)
        return y, [terms]

    def record(self, buffers: Buffers, terms: list[Tensor]) -> None:
        """Leave the terms to `RunningStatistics.fold`, which brings the microbatches of all ranks in order, or averages
        what each rank has updated by its own samples."""
        context = self.site.context
        by_microbatch = context.batch_norm == "microbatch"
        running = self._running(buffers, len(context.sizes) if by_microbatch else 1) if context.recording else None
        if running is None:
            return
        if not by_microbatch:
            for terms_of_pass in terms:
                follow_at_once(running, terms_of_pass)
        if running.mean.numel() and by_microbatch:
            context.statistics.record(running, context.starts, self._division().owners, *terms)
        elif running.mean.numel():
            context.statistics.record_local(running)

    def _running(self, buffers: Buffers, terms: int = 1) -> Running | None:
        """The statistics that so many terms are for, which are counted; copies where the call is computed again."""
        if not buffers:
            return None
        mean, var, *counts = buffers
        count = counts[0] if counts else None
        if mean is None or var is None:
            return None
        if not self.site.context.recording:
            mean, var = mean.clone(), var.clone()
        elif count is not None:
            count.add_(terms)
        momentum = 0.0 if self.momentum is None and count is None else self.momentum
        return Running(mean, var, momentum, count, self.name, self.sample_axes)

    def _division(self) -> _Division:
        sizes = self.site.context.sizes
        if torch.compiler.is_compiling():  # which is made anew when something that it has read changes
            return self._divide(sizes)
        if sizes not in self._divisions:
            self._divisions[sizes] = self._divide(sizes)
        return self._divisions[sizes]

    def _divide(self, sizes: tuple[int, ...]) -> _Division:
        where = f"layer {self.site.call.layer or self.site.call.name!r}"
        if sum(sizes) != self.shape[0]:
            raise ConvoyError(
                f"{where}: a batch norm of {self.shape[1]} channels sees {self.shape[0]} samples of a batch of "
                f"{sum(sizes)}: the network folds something into the batch, so set batch_norm=sync"
            )
        mesh, coordinates = self.site.mesh, self.site.coordinates
        places = mesh.group(coordinates, self.sample_axes)
        parts = [self.site.layouts[self.source].parts(0, mesh, place, self.shape[0]) for place in places]
        holder = {sample: rank for rank, part in enumerate(parts) for sample in part}
        ends = list(itertools.accumulate(sizes))
        owners = []
        for size, end in zip(sizes, ends, strict=True):
            ranks = {holder[sample] for sample in range(end - size, end)}
            if len(ranks) > 1:
                raise ConvoyError(
                    f"{where}: the plan divides a microbatch of {size} samples over several ranks, so that its batch "
                    "norm has no statistics of its own: use fewer sample ranks, or set batch_norm=sync"
                )
            owners.append(ranks.pop() if ranks else -1)
        rank = mesh.index(coordinates, self.sample_axes)  # along the axes that divide the samples
        local_sizes = tuple(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        return _Division(tuple(owners), local_sizes)


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
    return ended(joined(results), norm), terms


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
        x = _arranged(x)
        norm = Norm(weight, bias, None if residual is None else _arranged_as(x, residual), eps, relu)
        moments = _way(x).moments(x, sizes)
        if holders is not None:
            moments = exchanged(all_gather, moments[0], holders.group)
        way = batch_norm_kernels(x) or batch_norm_torch  # also where `x` is empty: it updates running statistics
        y, statistics, terms = way.normalize(x, moments, norm, running, sizes, holders is None)
        is_after_sum = relu and residual is not None
        ctx.save_for_backward(x, y if is_after_sum else None, weight, bias, statistics)
        ctx.sizes, ctx.relu, ctx.holders = sizes, relu and not is_after_sum, holders
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
        way = _way(dy)
        sums, sums_of_all, masked = way.gradient_sums(dy, saved, holders is not None)
        dy = dy if saved.y is None else masked  # behind the ReLU the gradient is that of both terms of the sum
        dx = None
        if needs_gradient[0] and holders is None:
            dx = way.input_gradient(dy, saved, sums, None)
        elif needs_gradient[0]:
            dx = way.input_gradient(dy, saved, all_reduce(sums_of_all, holders.group), holders.total)
        shift, slope = (sums[0] if len(sums) == 1 else sums.sum(0)).unbind(0)
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


def _way(x: Tensor) -> ModuleType:
    """The functions that compute: Triton's, which launch nothing for an empty tensor, or torch's."""
    return (batch_norm_kernels(x) if x.numel() else None) or batch_norm_torch


def _options(part: Part) -> dict[str, Any]:
    return {"training": bool(part.call.attributes["training"] and part.graph.training)}


def _shared_dims(call: Call, graph: Graph, layout: Layout) -> set[int]:
    return {0, *range(2, len(graph.shape(call.attributes["input"])))} if call.attributes["training"] else set()


OPERATIONS = (
    Operation(
        "batch_norm",
        by_channel,
        {"batch_norm": _batch_norm},
        _build,
        keeps=keeps_input,
        gives_own=True,
        follows=True,
        passes=1.0,
        local_options=_options,
        shared_dims=_shared_dims,
        statistics=lambda call, shape: 2 * shape[1],
    ),
)
