"""How long the collectives take over the groups of a mesh, measured on the ranks at hand."""

import math
import time
from collections.abc import Callable, Sequence
from itertools import chain, combinations, cycle
from statistics import median

import torch
from torch import Tensor

from convoy.comm import collectives
from convoy.comm.collectives import Group, gather_ints, place, size
from convoy.comm.groups import Groups
from convoy.engine.profiling import steady
from convoy.engine.watched import IN_A_ROW, DeviceClock
from convoy.planner.cost.link import Curve, Link, Links, first_group
from convoy.plans.mesh import Axes, Mesh

# Bytes of the messages that are measured, but for the first, which has one number
SIZES = (0, *(2**power for power in range(8, 27, 2)))
_MOST = 2**27  # bytes of the buffers that take turns, so that a message is as cold in the caches as gradients are
_TURNS = 4
_SPIN_S = 0.05
_SIDE = 4096  # of the matrices whose product is timed beside messages
_BESIDE = 2.0  # times as long as the products, as messages are on their way meanwhile


def measured_links(meshes: Sequence[Mesh], largest: int, device: torch.device) -> Links:
    """Links of the groups of all meshes; messages much larger than `largest`, the bytes of the largest tensor that will
    be sent, are not tried. All ranks call it."""
    sizes = [size for size in SIZES if size <= 4 * largest]
    links: dict[tuple[int, ...], Link] = {}
    for mesh in meshes:
        missing: dict[tuple[int, ...], Axes] = {}
        for axes in chain.from_iterable(combinations(mesh.axes, count + 1) for count in mesh.axes):
            ranks = first_group(mesh, axes)
            if len(ranks) > 1 and ranks not in links:
                missing.setdefault(ranks, axes)
        groups = Groups(mesh) if missing else None
        for ranks, axes in missing.items():
            assert groups is not None
            group = groups.of(axes)
            assert group is not None
            links[ranks] = _Probe(group, groups.of(tuple(mesh.axes)), device).measure(sizes)
    return Links(links)


class _Probe:
    """Measures one group, while the others over the same axes do so too."""

    def __init__(self, group: Group, world: Group, device: torch.device) -> None:
        self._group, self._world, self._device, self._clock = group, world, device, DeviceClock(device)
        self._ranks, self._place = size(group), place(group)
        self._busy, self._taken = 0.0, 0.0
        self._issuing: list[float] = []

    def measure(self, sizes: Sequence[int]) -> Link:
        rows: list[list[tuple[int, float]]] = [[], []]
        for num_bytes in sizes:
            numbers = max(1, num_bytes // 4)
            share = -(-numbers // max(1, self._ranks - 1))
            sent = 4 * share * (self._ranks - 1)
            rows[0].append((4 * numbers, self._time(lambda x: collectives.all_reduce(x, self._group), numbers)))
            rows[1].append((sent, self._time(self._exchange, share)))
        pending = collectives.start_all_reduce(torch.ones(2**20, device=self._device), self._group)
        overlap = pending.runs_beside
        pending.wait()
        cpu_share = min(1.0, self._busy / self._taken / _own_cores()) if self._taken else 0.0
        if overlap and self._clock.is_queue:
            largest, seconds = rows[0][-1]
            cpu_share = 1 - 1 / self._slowdown(seconds, largest)
        all_reduce, exchange = map(Curve.through, rows)
        return Link(all_reduce, exchange, overlap, cpu_share, host=median(self._issuing or [0.0]))

    def _slowdown(self, message_s: float, num_bytes: int) -> float:
        """How many times as long kernels of a GPU take beside messages, which take some of its processors; at least 1.
        An all-reduce of `num_bytes` takes `message_s` seconds."""
        matrix, out = (torch.ones(_SIDE, _SIDE, device=self._device) for _ in range(2))

        def compute() -> None:
            torch.mm(matrix, matrix, out=out)

        alone_s = self._clock.spent(compute).device
        buffer = torch.ones(num_bytes // 4, device=self._device)
        messages = 1 + math.ceil(_BESIDE * IN_A_ROW * alone_s / max(message_s, 1e-6))
        rows = gather_ints([messages], self._world)  # all send as many, and begin together
        self._clock.wait()
        pending = [collectives.start_all_reduce(buffer, self._group) for _ in range(max(row[0] for row in rows))]
        start = self._clock.now()
        for _ in range(IN_A_ROW):
            compute()
        beside_s = self._clock.between(start, self._clock.now()) / IN_A_ROW
        for message in pending:
            message.wait()
        rows = gather_ints([round(1e6 * max(1.0, beside_s / alone_s))], self._world)
        return max(row[0] for row in rows) / 1e6

    def _exchange(self, x: Tensor) -> object:
        sends: list[Tensor | None] = [x] * self._ranks
        sends[self._place] = x.new_empty(0)
        shapes = [None if rank == self._place else x.shape for rank in range(self._ranks)]
        return collectives.exchange(sends, shapes, self._group)

    def _time(self, run: Callable[[Tensor], object], numbers: int) -> float:
        """Seconds of one collective: of the slowest CPU; of the GPU that begins it last. Each GPU is kept busy for as
        long as its host has taken, so they begin one after another and end together."""
        of_ranks = min if self._clock.is_queue else max
        like = torch.ones(numbers, device=self._device)
        buffers = cycle([like.clone() for _ in range(max(1, min(_TURNS, _MOST // max(1, like.nbytes))))])

        def measure() -> tuple[float, float]:
            gather_ints([0], self._world)
            before = time.process_time()
            spent = self._clock.spent(lambda: run(next(buffers)))
            busy = time.process_time() - before
            issuing.append(spent.host)
            rows = gather_ints([round(1e9 * spent.device), round(1e9 * busy)], self._world)
            # all know the same, and end together
            return of_ranks(row[0] for row in rows) / 1e9, sum(row[1] for row in rows) / len(rows) / 1e9

        issuing: list[float] = []
        rounds = steady(measure, lambda times: times[0], within=0.1, most=12)
        self._issuing.append(median(issuing))
        if like.nbytes >= 2**20 and self._device.type == "cpu":  # a GPU moves data by itself
            self._taken += median(seconds for seconds, _ in rounds)
            self._busy += median(cpu for _, cpu in rounds)
        return median(seconds for seconds, _ in rounds)


def _own_cores() -> float:
    """Cores that this process computes with: its threads, as far as a share of a core does not hold them up."""
    start, before = time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - start) < _SPIN_S:
        pass
    return torch.get_num_threads() * min(1.0, (time.process_time() - before) / elapsed)
