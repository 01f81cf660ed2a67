"""Running statistics of batch norm layers, the same bits however the microbatches are divided over ranks.

Each microbatch adds one term to the running statistics, r ← (1 − m)·r + m·s. The order of the terms is that of the
microbatches in the global batch, so the ranks first collect the terms of an update and then all apply all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from convoy.comm.collectives import all_gather, all_reduce
from convoy.comm.groups import Groups
from convoy.plans.mesh import Axes

Term = tuple[Tensor, Tensor]
"""Mean and unbiased variance of one microbatch, [channels] each."""


@dataclass(frozen=True)
class Running:
    """The buffers of one layer, on this rank.

    Attributes:
        name: of the running mean; calls that share the buffers share the name.
        mean, var: [channels].
        count: number of terms so far, with those that are still to be applied; None where the layer does not count.
        momentum: weight of a term; None weighs all terms alike.
        axes: mesh axes over which the layer's samples are divided.
    """

    name: str
    mean: Tensor
    var: Tensor
    count: Tensor | None
    momentum: float | None
    axes: Axes = ()


@dataclass
class _Terms:
    """Terms of one layer in the order of its calls: the microbatch's first sample, who has it, and what it is."""

    running: Running
    starts: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    terms: list[Term | None] = field(default_factory=list)

    def add(self, starts: Sequence[int], owners: Sequence[int], terms: Sequence[Term | None]) -> None:
        self.starts += starts
        self.owners += owners
        self.terms += terms

    def sort(self) -> None:
        """Bring the terms in the order of their microbatches, whichever passes a rank was in."""
        order = sorted(range(len(self.starts)), key=lambda i: (self.starts[i], i))
        self.starts, self.owners = [self.starts[i] for i in order], [self.owners[i] for i in order]
        self.terms = [self.terms[i] for i in order]

    def known(self) -> list[Term]:
        return [term for term in self.terms if term is not None]


class RunningStatistics:
    """Collects what the batch norm layers of a network see in one update, and brings their buffers up to date."""

    def __init__(self) -> None:
        self._layers: dict[str, _Terms] = {}
        self._local: dict[str, Running] = {}
        self._left_out: list[tuple[Sequence[int], Sequence[int]]] = []

    def record(
        self, running: Running, starts: Sequence[int], owners: Sequence[int], terms: Sequence[Term | None]
    ) -> None:
        """Note one pass through a layer.

        Args:
            running: the layer's buffers.
            starts: for every microbatch of the pass on all ranks, its first sample's position in the global batch.
            owners: for every microbatch, the rank along `running.axes` that has it.
            terms: for every microbatch its statistics, None for those of other ranks.
        """
        self._layers.setdefault(running.name, _Terms(running)).add(starts, owners, terms)

    def record_left_out(self, starts: Sequence[int], owners: Sequence[int]) -> None:
        """Note a pass in which only other ranks have microbatches, and which this one does not run.

        All layers then hold the same samples, and this rank runs another pass of the same update.
        """
        self._left_out.append((starts, owners))

    def record_local(self, running: Running) -> None:
        """Note a layer whose buffers each rank has updated by the samples of its own."""
        self._local[running.name] = running

    @torch.no_grad()
    def fold(self, groups: Groups | None = None) -> None:
        """Apply all terms since the last time, in order; all ranks must call it together.

        Buffers that every rank has updated by itself become their mean over the ranks.
        """
        for layer in self._layers.values():
            if self._left_out:
                self._add_left_out(layer)
            layer.sort()
        if groups is not None:
            for axes in sorted({layer.running.axes for layer in self._layers.values()}):
                _collect([layer for layer in self._layers.values() if layer.running.axes == axes], axes, groups)
            self._average(groups)
        _apply(list(self._layers.values()))
        self._layers, self._local, self._left_out = {}, {}, []

    def _add_left_out(self, layer: _Terms) -> None:
        """What the layer would have noted, as often in a pass as it is called."""
        calls = layer.starts.count(layer.starts[-1])
        for starts, owners in self._left_out:
            for _ in range(calls):
                layer.add(starts, owners, [None] * len(starts))
            if layer.running.count is not None:
                layer.running.count.add_(calls * len(starts))

    def _average(self, groups: Groups) -> None:
        for axes in sorted({running.axes for running in self._local.values()}):
            group = groups.of(axes)
            if group is None:
                continue
            buffers = [
                b for running in self._local.values() if running.axes == axes for b in (running.mean, running.var)
            ]
            flat = torch.cat([buffer.flatten() for buffer in buffers])
            flat = all_reduce(flat, group) / groups.mesh.size(axes)
            torch._foreach_copy_(buffers, list(flat.split([buffer.numel() for buffer in buffers])))


def _collect(layers: list[_Terms], axes: Axes, groups: Groups) -> None:
    """Fill in the terms that other ranks have: one exchange for all layers."""
    group = groups.of(axes)
    if group is None:
        return
    ranks = range(groups.mesh.size(axes))
    sizes = [sum(2 * layer.running.mean.numel() * layer.owners.count(rank) for layer in layers) for rank in ranks]
    own = [part for layer in layers for term in layer.terms if term is not None for part in term]
    reference = layers[0].running.mean
    flat = torch.cat([*own, reference.new_zeros(max(sizes) - sum(part.numel() for part in own))])
    gathered = all_gather(flat, group)
    for rank in ranks:
        start = 0
        for layer in layers:
            channels = layer.running.mean.numel()
            for i in (i for i, owner in enumerate(layer.owners) if owner == rank):
                mean, var = gathered[rank, start : start + 2 * channels].to(layer.running.mean.dtype).split(channels)
                layer.terms[i] = mean, var
                start += 2 * channels


def add_term(running: list[Tensor], term: list[Tensor] | Term, weights: list[float]) -> None:
    """r ← (1 − m)·r + m·s, in place.

    Products and sums are rounded one by one: a fused operation would round otherwise at the end of a vector than in
    its middle, and so depend on how the channels are divided.
    """
    torch._foreach_mul_(running, [1.0 - weight for weight in weights])
    torch._foreach_add_(running, torch._foreach_mul(term, weights))


def _apply(layers: list[_Terms]) -> None:
    """One term after the other, for all layers at once."""
    terms = [layer.known() for layer in layers]
    weights = [_weights(layer.running, len(found)) for layer, found in zip(layers, terms, strict=True)]
    for i in range(max(map(len, terms), default=0)):
        having = [place for place, found in enumerate(terms) if i < len(found)]
        running = [b for place in having for b in (layers[place].running.mean, layers[place].running.var)]
        new = [b for place in having for b in terms[place][i]]
        add_term(running, new, [weights[place][i] for place in having for _ in range(2)])


def _weights(running: Running, terms: int) -> list[float]:
    if running.momentum is not None:
        return [running.momentum] * terms
    assert running.count is not None
    before = int(running.count) - terms
    return [1.0 / (before + i + 1) for i in range(terms)]
