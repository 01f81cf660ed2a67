"""Batch norm of a rank's part of an activation."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Graph, Recognized, TorchCall
from convoy.ops.kernel import Alone, Exchanging, Kernel, Recorded, Site, by_role
from convoy.ops.layouts import by_channel
from convoy.ops.microbatch_norm import (
    Branch,
    Holders,
    at_once,
    ended,
    follow,
    new_term,
    normalize_at_once,
    normalize_by_itself,
)
from convoy.ops.norms import affine
from convoy.ops.operation import Operation, keeps_input
from convoy.ops.shared_batch_norm import all_moments, normalize_both, normalize_by, normalize_together, own_moments
from convoy.ops.statistics import Following, Running, add_term
from convoy.plans.layout import Layout
from convoy.plans.mesh import Axes, Coordinates, Mesh
from convoy.plans.place import Placed


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


@dataclass(frozen=True)
class Buffers:
    """The running statistics; None where the layer keeps none."""

    mean: Tensor | None
    var: Tensor | None
    count: Tensor | None


@dataclass(frozen=True)
class Tensors:
    """The tensors of a call; None for those that it lacks. The residual is added to its result."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None
    var: Tensor | None
    count: Tensor | None
    residual: Tensor | None = None


def _build(site: Site) -> Kernel:
    """The kernel by running statistics in evaluation, otherwise as the context's mode says."""
    attributes, names = site.call.attributes, site.call.inputs
    layer, pick = _Layer(site), by_role(site.call, *ARGUMENTS)
    if site.twin is not None:
        return Alone(_both(layer, _Layer(site.twin), site, site.twin))

    def bind(tensors: Sequence[Tensor]) -> Tensors:
        t = Tensors(*pick(tensors))
        return t if site.addend is None else replace(t, residual=tensors[len(names)])

    def whole(run: Callable[[Tensors], Tensor]) -> Kernel:
        return lambda *tensors: [run(bind(tensors))]

    if not attributes["training"]:
        return whole(layer.by_running_statistics)
    buffer_names = [attributes[name] for name in ARGUMENTS[3:]]
    buffers = tuple(names.index(name) for name in buffer_names if name is not None)

    def bind_buffers(tensors: Iterable[Tensor]) -> Buffers:
        remaining = iter(tensors)
        return Buffers(*[None if name is None else next(remaining) for name in buffer_names])

    if not site.graph.training or site.context.batch_norm == "sync":
        if layer.passing is None or site.local_shape(layer.source)[1] == 0:
            return Alone(whole(layer.by_whole_pass))
        return Exchanging(
            whole(layer.by_whole_pass),
            whole(lambda t: own_moments(t.x)),
            lambda *tensors: [layer.exchange(bind_buffers(tensors[:-1]), tensors[-1])],
            lambda *tensors: [layer.normalize_by(bind(tensors[:-1]), tensors[-1])],
            buffers,
        )
    by_microbatch = site.context.batch_norm == "microbatch"
    compute = layer.by_microbatch if by_microbatch else layer.by_own_samples
    record = layer.record_microbatches if by_microbatch else layer.record_own_samples
    kernel = Recorded(
        lambda *tensors: compute(bind(tensors)), lambda tensors, terms: record(bind_buffers(tensors), terms), buffers
    )
    return kernel if layer.own is None else Alone(kernel)


def _both(layer: "_Layer", twin: "_Layer", site: Site, twin_site: Site) -> Kernel:
    """The sum of two batch norms over all ranks: of the call's inputs and then those of its twin."""
    picks = [by_role(call, *ARGUMENTS) for call in (site.call, twin_site.call)]
    number = len(site.call.inputs)

    def kernel(*tensors: Tensor) -> list[Tensor]:
        t, twin_t = Tensors(*picks[0](tensors[:number])), Tensors(*picks[1](tensors[number:]))
        if layer.passing is None or t.x.shape[1] == 0:
            return [layer.by_whole_pass(replace(t, residual=twin.by_whole_pass(twin_t)))]
        return [normalize_both(layer.branch(t), twin.branch(twin_t), layer.passing, layer.relu)]

    return kernel


def _nothing(t: Tensors) -> Tensor:
    """A result without elements; scale and shift get a gradient of zero, and what is added is one of its inputs, so
    that its backward pass runs on every rank."""
    return ended(affine(t.x.clone(), t.weight, t.bias, (-1, *[1] * (t.x.dim() - 2))), t.residual, False)


class _Layer:
    """The computation of a layer in each mode."""

    def __init__(self, site: Site) -> None:
        attributes = site.call.attributes
        self.site = site
        self.relu = site.relu
        self.source: str = attributes["input"]
        self.eps: float = attributes["eps"]
        self.momentum: float | None = attributes["momentum"]
        self.name: str = attributes["running_mean"] or site.call.name
        self.shape = site.graph.shape(self.source)
        layout = site.layouts[self.source]
        samples = layout.split(0)
        self.sample_axes: Axes = samples.axes if samples else ()
        self.other_axes = tuple(sorted(axis for dim, split in layout.splits if dim > 1 for axis in split.axes))
        self.in_turns = site.context.in_turns and not site.graph.training and attributes["running_mean"] is None
        divided_axes = tuple(sorted({*self.sample_axes, *self.other_axes}))
        self.passing = self._holders(self.other_axes if self.in_turns else divided_axes)
        self.own = self._holders(self.other_axes, samples=False)
        self._divisions: dict[tuple[int, ...], _Division] = {}
        self._holders_of: dict[int, Holders] = {}

    def by_running_statistics(self, t: Tensors) -> Tensor:
        if t.x.shape[1] == 0:  # torch's functions refuse tensors without channels
            return _nothing(t)
        y = F.batch_norm(t.x, t.mean, t.var, t.weight, t.bias, False, 0.0, self.eps)
        return ended(y, t.residual, self.relu)

    def by_whole_pass(self, t: Tensors) -> Tensor:
        """Normalize over the samples, rows and columns of all ranks."""
        if t.x.shape[1] == 0 or (self.in_turns and len(t.x) == 0):
            self._count(t.count, 1)
            return _nothing(t)
        if self.passing is not None:
            running = self._following(Buffers(t.mean, t.var, t.count))
            return normalize_together(t.x, t.weight, t.bias, running, self.eps, self.passing, self.relu, t.residual)
        if self._by_kernels(t.x):
            following = self._following(Buffers(t.mean, t.var, t.count))
            return self._at_once(t, (len(t.x),), following)[0]
        weight = self._weight(t.count, 1)
        y = F.batch_norm(t.x, *self._to_follow(t), t.weight, t.bias, True, weight, self.eps)
        return ended(y, t.residual, self.relu)

    def branch(self, t: Tensors) -> Branch:
        """The call over all ranks; it updates the running statistics."""
        return Branch(t.x, t.weight, t.bias, self._following(Buffers(t.mean, t.var, t.count)), self.eps)

    def exchange(self, buffers: Buffers, moments: Tensor) -> Tensor:
        """The moments of all ranks: the middle of `by_whole_pass`, where that is taken apart."""
        assert self.passing is not None
        return all_moments(moments, self._following(buffers), self.passing)

    def normalize_by(self, t: Tensors, moments: Tensor) -> Tensor:
        return ended(normalize_by(t.x, t.weight, t.bias, moments, self.eps), t.residual, self.relu)

    def by_own_samples(self, t: Tensors) -> tuple[Tensor, list[Tensor]]:
        """Normalize over the samples of this rank: approximate, as the result depends on how many ranks there are. A
        GPU updates the running statistics in the same launch."""
        if t.x.shape[1] == 0 or len(t.x) == 0:
            return _nothing(t), []
        if self.own is None and self._by_kernels(t.x):
            is_followed = self.momentum is not None and t.mean is not None and self.site.context.recording
            following = Following(t.mean, t.var, self.momentum) if is_followed else None  # type: ignore[arg-type]
            y, terms = self._at_once(t, (len(t.x),), following)
            return y, [] if is_followed else [terms[0]]
        y, term = self._normalize(t, t.x)
        return ended(y, t.residual, self.relu), [term]

    def record_own_samples(self, buffers: Buffers, terms: list[Tensor]) -> None:
        """Update this rank's statistics; `RunningStatistics.fold` averages them."""
        if not self.site.context.recording:
            return
        self._count(buffers.count, 1)
        running = self._running(buffers)
        if running is None:
            return
        if running.mean.numel():
            self.site.context.statistics.record_local(running)
        if terms and at_once(terms[0]):
            momentum = 0.0 if self.momentum is None and buffers.count is None else self.momentum
            follow(running.mean, running.var, running.count, momentum, terms[0][None])
        elif terms:
            add_term([running.mean, running.var], terms[0].unbind(0), [self._weight(buffers.count)] * 2)

    def by_microbatch(self, t: Tensors) -> tuple[Tensor, list[Tensor]]:
        """Normalize over each microbatch, all of whose samples one rank has."""
        sizes = self._division().sizes if t.x.shape[1] else ()
        if not sizes:
            return _nothing(t), []
        if self.own is None and (self._by_kernels(t.x) or (at_once(t.x) and len(sizes) > 1)):
            y, terms = self._at_once(t, sizes, None)
            return y, [terms]
        pieces = [self._normalize(t, x) for x in t.x.split(sizes)]
        y = pieces[0][0] if len(pieces) == 1 else torch.cat([y for y, _ in pieces])
        return ended(y, t.residual, self.relu), [torch.stack([term for _, term in pieces])]

    def record_microbatches(self, buffers: Buffers, terms: list[Tensor]) -> None:
        """Leave the terms to `RunningStatistics.fold`, which brings the microbatches of all ranks in order."""
        context = self.site.context
        if not context.recording:
            return
        self._count(buffers.count, len(context.sizes))
        running = self._running(buffers)
        if running is None or running.mean.numel() == 0:
            return
        context.statistics.record(running, context.starts, self._division().owners, *terms)

    def _by_kernels(self, x: Tensor) -> bool:
        """Whether Convoy's own kernels run: a compiler makes better ones of torch's operations."""
        return at_once(x) and not torch.compiler.is_compiling()

    def _at_once(self, t: Tensors, sizes: tuple[int, ...], following: Following | None) -> tuple[Tensor, Tensor]:
        return normalize_at_once(t.x, t.weight, t.bias, self.eps, sizes, following, self.relu, t.residual)

    def _to_follow(self, t: Tensors) -> tuple[Tensor | None, Tensor | None]:
        """The buffers that torch's own batch norm updates: copies where the call is computed again."""
        if self.site.context.recording or t.mean is None or t.var is None:
            return t.mean, t.var
        return t.mean.clone(), t.var.clone()

    def _following(self, buffers: Buffers) -> Following | None:
        """The buffers with one more term counted; None where nobody keeps them."""
        if not self.site.context.recording:
            return None
        if buffers.count is not None:
            buffers.count.add_(1)
        if buffers.mean is None or buffers.var is None:
            return None
        momentum = 0.0 if self.momentum is None and buffers.count is None else self.momentum
        return Following(buffers.mean, buffers.var, momentum, buffers.count)

    def _running(self, buffers: Buffers) -> Running | None:
        if buffers.mean is None or buffers.var is None:
            return None
        return Running(self.name, buffers.mean, buffers.var, buffers.count, self.momentum, self.sample_axes)

    def _normalize(self, t: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.own is None:
            return normalize_by_itself(x, t.weight, t.bias, self.eps)
        rows = len(x)
        if rows not in self._holders_of:
            self._holders_of[rows] = Holders(self.own.group, tuple(rows * count for count in self.own.counts))
        term = new_term(x, t.weight)
        following = Following(term[0], term[1], 1.0)
        return normalize_together(x, t.weight, t.bias, following, self.eps, self._holders_of[rows]), term

    def _count(self, count: Tensor | None, terms: int) -> None:
        if count is not None and self.site.context.recording:
            count.add_(terms)

    def _weight(self, count: Tensor | None, terms: int = 0) -> float:
        """Count terms; the weight of the last one, where it is not left to `fold`."""
        self._count(count, terms)
        if self.momentum is not None:
            return self.momentum
        return 0.0 if count is None else 1.0 / float(count)

    def _holders(self, axes: Axes, samples: bool = True) -> Holders | None:
        """The ranks along some axes, and how many numbers of each channel they have."""
        group = self.site.groups.of(axes)
        if group is None:
            return None
        dims = [dim for dim in range(len(self.shape)) if dim > 1 or (dim == 0 and samples)]
        layout, mesh = self.site.layouts[self.source], self.site.mesh
        counts = (
            math.prod(len(layout.parts(dim, mesh, place, self.shape[dim])) for dim in dims)
            for place in mesh.group(self.site.coordinates, axes)
        )
        return Holders(group, tuple(counts))

    def _division(self) -> "_Division":
        sizes = self.site.context.sizes
        if torch.compiler.is_compiling():  # which is made anew when something that it has read changes
            return self._divide(sizes)
        if sizes not in self._divisions:
            self._divisions[sizes] = self._divide(sizes)
        return self._divisions[sizes]

    def _divide(self, sizes: tuple[int, ...]) -> "_Division":
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
        rank = mesh.index(coordinates, self.sample_axes)
        local_sizes = tuple(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        return _Division(rank, tuple(owners), local_sizes)


@dataclass(frozen=True)
class _Division:
    """Who has the microbatches of a pass."""

    rank: int  # this one, along the axes that divide the samples
    owners: tuple[int, ...]  # the rank that has each microbatch
    sizes: tuple[int, ...]  # samples in each of this rank's microbatches


def _options(call: Call, placed: Placed, graph: Graph, mesh: Mesh, place: Coordinates) -> dict[str, Any]:
    return {"training": bool(call.attributes["training"] and graph.training)}


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
