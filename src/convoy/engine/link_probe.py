"""How long the collectives take over the groups of a mesh, measured on the ranks at hand."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from convoy.engine import collectives
from convoy.engine.collectives import Group, gather_ints, size
from convoy.engine.groups import Groups
from convoy.engine.transfer import Transfer
from convoy.plans.layout import WHOLE, Layout, Split
from convoy.plans.mesh import Axes
from convoy.plans.transfer import Step

SIZES = (0, *(2**power for power in range(8, 27, 2)))
"""Bytes of the messages that are measured, but for the first, which has one number."""
_SMALL = 50
_MOST = 2**27
"""Bytes of the buffers that take turns, so that a message is as cold in the caches as gradients are."""


@dataclass(frozen=True)
class LinkTimes:
    """What was measured of the groups over some axes, all exchanging at the same time.

    Attributes:
        all_reduce: (bytes of the tensor, seconds).
        exchange: (bytes that a rank sends to the others together, seconds).
        overlap: whether messages run beside what computes.
        cpu_share: the part of the core that they take meanwhile.
        overhead: seconds that the engine takes for a redistribution in one direction, beside the collective.
    """

    all_reduce: tuple[tuple[int, float], ...]
    exchange: tuple[tuple[int, float], ...]
    overlap: bool
    cpu_share: float
    overhead: float


def measure_links(
    groups: Groups, subsets: Iterable[Axes], sizes: Sequence[int] = SIZES, repetitions: int = 5
) -> dict[Axes, LinkTimes]:
    """Measure the groups over each of some sets of axes; all ranks call it.

    Args:
        groups: of the mesh.
        subsets: sets of axes.
        sizes: of the messages, in bytes.
        repetitions: of each; the median counts, that of the slowest rank.
    """
    world = groups.of(tuple(groups.mesh.axes))
    found = {}
    for axes in subsets:
        group = groups.of(axes)
        if group is not None:
            found[axes] = _measure(group, world, sizes, repetitions, _overhead(groups, axes))
    return found


def _measure(group: Group, world: Group, sizes: Sequence[int], repetitions: int, redistributing: float) -> LinkTimes:
    ranks = size(group)
    sums: list[tuple[int, float]] = []
    moves: list[tuple[int, float]] = []
    busy = [0.0, 0.0]
    for wanted in sizes:
        numbers = max(1, wanted // 4)
        seconds, cpu = _time(lambda x: collectives.all_reduce(x, group), (numbers,), world, repetitions)
        sums.append((4 * numbers, seconds))
        rows = -(-numbers // max(1, ranks - 1))
        moved, _ = _time(lambda x: collectives.all_to_all(x, group), (ranks, rows), world, repetitions)
        moves.append((4 * rows * (ranks - 1), moved))
        if wanted >= 2**20:
            busy = [busy[0] + cpu, busy[1] + seconds]
    probe = collectives.start_all_reduce(torch.ones(2**20), group)
    overlap = probe.runs_beside
    probe.wait()
    share = min(1.0, busy[0] / busy[1]) if busy[1] else 0.0
    return LinkTimes(tuple(sums), tuple(moves), overlap, share, max(0.0, redistributing - moves[0][1]))


def _overhead(groups: Groups, axes: Axes) -> float:
    """Seconds of a redistribution of next to nothing in one direction: the median of the slowest rank's."""
    mesh, ranks = groups.mesh, groups.mesh.size(axes)
    split = Layout.of({0: Split(axes, tuple(range(rank, rank + 1) for rank in range(ranks)))})
    transfer = Transfer(Step("gather", axes, split, WHOLE), mesh, groups.coordinates, groups, (ranks, 1))
    seconds = []
    for _ in range(_SMALL):
        x = torch.ones(1, 1, requires_grad=True)
        start = time.perf_counter()
        y = transfer(x)
        seconds.append(time.perf_counter() - start)
        y.sum().backward()
    rows = gather_ints([round(median(seconds) * 1e9)], groups.of(tuple(mesh.axes)))
    return max(row[0] for row in rows) / 1e9


def _time(
    run: Callable[[Tensor], object], shape: tuple[int, ...], world: Group, repetitions: int
) -> tuple[float, float]:
    """Seconds, and those of the processor, of one collective: the median of the slowest rank's."""
    like = torch.ones(shape)
    buffers = [like.clone() for _ in range(max(1, min(repetitions, _MOST // max(1, like.nbytes))))]
    run(like)
    seconds, cpu = [], []
    for number in range(repetitions):
        gather_ints([0], world)
        start, before = time.perf_counter(), time.process_time()
        run(buffers[number % len(buffers)])
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - before)
    rows = gather_ints([round(median(seconds) * 1e9), round(median(cpu) * 1e9)], world)
    return max(row[0] for row in rows) / 1e9, sum(row[1] for row in rows) / len(rows) / 1e9
