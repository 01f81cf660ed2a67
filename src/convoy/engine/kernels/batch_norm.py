"""Batch norm of a rank's part of an activation."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.engine.batch_norm import normalise_by_itself
from convoy.engine.kernels.kernel import Kernel, Site
from convoy.engine.kernels.shared_statistics import affine
from convoy.engine.kernels.synchronised import Holders, normalise_together
from convoy.engine.statistics import Running, Term, add_term
from convoy.errors import ConvoyError
from convoy.plans.mesh import Axes

ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Tensors:
    """What a call is given; None where it is not."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None
    var: Tensor | None
    count: Tensor | None


def build(site: Site) -> Kernel:
    """By running statistics in evaluation, otherwise as the context's mode says."""
    attributes, names = site.call.attributes, site.call.inputs
    layer = _Layer(site)
    if not attributes["training"]:
        run = layer.by_running_statistics
    elif site.graph.training and site.context.batch_norm == "microbatch":
        run = layer.by_microbatch
    elif site.graph.training and site.context.batch_norm == "local":
        run = layer.by_own_samples
    else:
        run = layer.by_whole_pass

    def kernel(*tensors: Tensor) -> list[Tensor]:
        found: dict[str | None, Tensor] = dict(zip(names, tensors, strict=True))
        given: list[Any] = [found.get(attributes[name]) for name in ARGUMENTS]
        t = Tensors(*given)
        return [run(t) if t.x.shape[1] else layer.without_channels(t)]

    return kernel


def _nothing(t: Tensors) -> Tensor:
    """The result without elements; scale and shift get a gradient of zero."""
    return affine(t.x.clone(), t.weight, t.bias, (-1, *[1] * (t.x.dim() - 2)))


class _Layer:
    """What a layer does in each mode."""

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
        self.other_axes = tuple(sorted(axis for dim, split in layout.splits if dim > 1 for axis in split.axes))
        self.passing = self._holders(tuple(sorted({*self.sample_axes, *self.other_axes})))
        self.own = self._holders(self.other_axes, samples=False)
        self._divisions: dict[tuple[int, ...], _Division] = {}

    def without_channels(self, t: Tensors) -> Tensor:
        """Torch's functions refuse tensors without channels."""
        if self.site.call.attributes["training"]:
            by_microbatch = self.site.graph.training and self.site.context.batch_norm == "microbatch"
            self._count(t, len(self.site.context.sizes) if by_microbatch else 1)
        return _nothing(t)

    def by_running_statistics(self, t: Tensors) -> Tensor:
        return F.batch_norm(t.x, t.mean, t.var, t.weight, t.bias, False, 0.0, self.eps)

    def by_whole_pass(self, t: Tensors) -> Tensor:
        """Over the samples, rows and columns of all ranks."""
        weight = self._count(t, 1)
        if self.passing is None:
            return F.batch_norm(t.x, t.mean, t.var, t.weight, t.bias, True, weight, self.eps)
        y, term = normalise_together(t.x, t.weight, t.bias, self.eps, self.passing)
        if t.mean is not None and t.var is not None:
            add_term([t.mean, t.var], term, [weight] * 2)
        return y

    def by_own_samples(self, t: Tensors) -> Tensor:
        """Over the samples of this rank; approximate: the result depends on how many ranks there are."""
        weight = self._count(t, 1)
        if t.mean is not None and t.var is not None:
            running = Running(self.name, t.mean, t.var, t.count, self.momentum, self.sample_axes)
            self.site.context.statistics.record_local(running)
        if len(t.x) == 0:
            return _nothing(t)
        y, term = self._normalise(t, t.x)
        if t.mean is not None and t.var is not None:
            add_term([t.mean, t.var], term, [weight] * 2)
        return y

    def by_microbatch(self, t: Tensors) -> Tensor:
        """Over each microbatch, all of which a rank has; the running statistics follow in `RunningStatistics.fold`."""
        division = self._division()
        self._count(t, len(division.owners))
        whole = len(division.sizes) == 1
        pieces = [self._normalise(t, x) for x in ([t.x] if whole else t.x.split(division.sizes))]
        if t.mean is not None and t.var is not None:
            running = Running(self.name, t.mean, t.var, t.count, self.momentum, self.sample_axes)
            own = iter(pieces)
            terms = [next(own)[1] if owner == division.rank else None for owner in division.owners]
            self.site.context.statistics.record(running, self.site.context.starts, division.owners, terms)
        if not pieces:
            return _nothing(t)
        return pieces[0][0] if whole else torch.cat([y for y, _ in pieces])

    def _normalise(self, t: Tensors, x: Tensor) -> tuple[Tensor, Term]:
        if self.own is None:
            return normalise_by_itself(x, t.weight, t.bias, self.eps)
        rows = len(x)
        holders = Holders(self.own.group, tuple(rows * count for count in self.own.counts))
        return normalise_together(x, t.weight, t.bias, self.eps, holders)

    def _count(self, t: Tensors, terms: int) -> float:
        """Count terms of the running statistics; the weight of the next one, where it is not left to `fold`."""
        if t.count is not None:
            t.count.add_(terms)
        if self.momentum is not None:
            return self.momentum
        return 0.0 if t.count is None else 1.0 / float(t.count)

    def _holders(self, axes: Axes, samples: bool = True) -> Holders | None:
        """The ranks along some axes, and how many numbers of each channel they have."""
        group = self.site.groups.of(axes)
        if group is None:
            return None
        samples = samples and set(axes) >= set(self.sample_axes)
        dims = [dim for dim in range(len(self.shape)) if dim > 1 or (dim == 0 and samples)]
        layout, mesh = self.site.layouts[self.source], self.site.mesh
        counts = (
            math.prod(len(layout.parts(dim, mesh, place, self.shape[dim])) for dim in dims)
            for place in mesh.group(self.site.coordinates, axes)
        )
        return Holders(group, tuple(counts))

    def _division(self) -> "_Division":
        sizes = self.site.context.sizes
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
        own = tuple(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        return _Division(rank, tuple(owners), own)


@dataclass(frozen=True)
class _Division:
    """Who has the microbatches of a pass.

    Attributes:
        rank: this one, along the axes that divide the samples.
        owners: the rank that has each microbatch.
        sizes: samples in each of this rank's microbatches.
    """

    rank: int
    owners: tuple[int, ...]
    sizes: tuple[int, ...]
