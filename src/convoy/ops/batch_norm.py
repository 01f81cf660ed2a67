"""Batch norm of a rank's part of an activation."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Graph, Recognized, TorchCall
from convoy.ops.batch_norm_torch import Norm, ended
from convoy.ops.kernel import Alone, Kernel, Part, Recorded, Site, by_role
from convoy.ops.layouts import by_channel
from convoy.ops.normalization import Holders, by_kernels, normalize, normalize_each
from convoy.ops.norms import affine
from convoy.ops.operation import Operation, keeps_input
from convoy.ops.statistics import Running
from convoy.plans.layout import Layout
from convoy.plans.mesh import Axes


def _batch_norm(call: TorchCall) -> Recognized:
    arguments = call.bound(
        input=None, running_mean=None, running_var=None, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    )
    counter = call.updates[-1] if call.updates and arguments["training"] and arguments["running_mean"] else None
    if counter and hasattr(call.module, "momentum"):  # the argument is 1 / count where the layer has None
        arguments["momentum"] = call.module.momentum
    updates = bool(arguments["training"] and arguments["running_mean"])
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
        return Alone(whole(layer.by_whole_pass))
    buffers = tuple(names.index(attributes[name]) for name in ARGUMENTS[3:] if attributes[name] is not None)
    kernel = Recorded(lambda *tensors: call(layer.by_own_samples, tensors), layer.record, buffers)
    return kernel if layer.own is None else Alone(kernel)


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
        if x.shape[1] == 0 or (self.in_turns and len(x) == 0):
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
                running.follow(terms_of_pass)
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
