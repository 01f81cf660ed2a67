"""Profiling on the devices at hand: how long every operation of a placement takes, what the engine itself takes, and
the collectives over the groups of a mesh.

The engine's own time in an update shows on networks so small that there is little else.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations, count, cycle, pairwise
from statistics import median

import torch
from torch import Tensor, nn

from convoy.comm import collectives
from convoy.comm.collectives import Group, gather_ints
from convoy.comm.groups import Groups
from convoy.comm.ranks import Ranks
from convoy.engine.parallelize import local_samples, take_part
from convoy.engine.profiling import OUTSIDE, Profiler, Times, steady
from convoy.engine.watched import IN_A_ROW, DeviceClock
from convoy.planner.cost.costs import Costs, mean
from convoy.planner.cost.link import Collective, Curve, Link, Links, first_group
from convoy.planner.cost.local_op import VIEWS, LocalOp, dtype_name, local_op
from convoy.planner.cost.prediction import predict
from convoy.planner.cost.program import InternalMessages, internal_messages, moved
from convoy.planner.workload import Workload, momentum, workload_of
from convoy.plans.mesh import Axes, Mesh
from convoy.plans.place import PlacedCall, Placement
from convoy.plans.plan import Plan
from convoy.plans.traffic import step_elements
from convoy.plans.transfer import Step

ALIKE = 1.1  # devices are taken to be equal where the slowest takes no more than so many times as long as the fastest
_SMALL = 0.01  # operations that take less than this part of the time say nothing about how fast a rank is


@dataclass(frozen=True)
class Profiled:
    """What a profiling has shown."""

    times: dict[LocalOp, Times]
    around: Times  # a pass outside of its calls
    # seconds of each rank for the operations that all of them had; empty where only one profiled
    by_rank: tuple[float, ...] = ()


def profile(
    workload: Workload,
    placement: Placement,
    ranks: Ranks,
    alone: bool,
    links: Links,
    together: bool = False,
    enough: int = 3,
    passed: Callable[[int], None] = lambda number: None,
) -> Profiled:
    """Times of the operations on all ranks, the mean where several have the same, and of what belongs to no call.

    Alone, the first rank runs while the others wait. Otherwise each runs a place of the mesh, all at the same time.
    Where they do so together they exchange what they will exchange. What that takes beside the time of its messages on
    the links, with waiting for the slower rank, is the time of the redistribution's operation or the call's. `enough`
    passes of each rank must be near its fastest; after each `passed` is told how many there were.
    """
    mesh = placement.mesh
    passes = count(1)

    def agree(done: bool) -> bool:
        passed(next(passes))
        return done if alone else ranks.agree(done)

    def slowest(seconds: float) -> float:
        return seconds if alone else ranks.largest(round(1e9 * seconds))[0] / 1e9

    place = 0 if alone else ranks.places(mesh)[ranks.rank]
    rows_here: list[tuple[LocalOp, Times]] = []
    meetings: set[LocalOp] = set()  # in which a rank waits for others, so that they say nothing about its speed
    around, pass_s, slowest_s = Times(), 0.0, 0.0
    if not alone or ranks.rank == 0:
        if together:
            try_out(workload, placement, place)
        with autocast(workload):
            groups = Groups(mesh) if together else None
            profiled = _profiler(workload, placement, place, groups).run(agree, slowest, enough)
        times, pass_s, slowest_s = profiled.calls, profiled.seconds, profiled.slowest
        for placed in placement.calls:
            op = local_op_of(workload, placement, placed, place)
            if placed.call.name in times and not op.is_empty and op.op not in VIEWS:
                messages = InternalMessages()
                if together:
                    messages = internal_messages(placed, placement.graph, mesh, op, workload.batch_norm)
                rows_here.append((op, _without(times[placed.call.name], messages, mesh, links)))
                meetings |= {op} if messages.axes else set()
        if together:
            for transfer in profiled.transfers:
                rows_here.append(_redistribution(placement, place, transfer, links))
                meetings.add(rows_here[-1][0])
        around = times[OUTSIDE]
    measured: dict[LocalOp, list[Times]] = {}
    arounds: list[Times] = []
    answers = ranks.gather((rows_here, around, meetings, pass_s, slowest_s))
    by_rank = () if alone else _of_each_rank([rows for rows, *_ in answers], set().union(*(row[2] for row in answers)))
    is_even = bool(by_rank) and max(by_rank) <= ALIKE * min(by_rank)  # otherwise the timeline knows who waits for whom
    late = max(slowest for *_, slowest in answers) / max(seconds for *_, seconds, _ in answers)
    for rank, (rows, around_rank, *_) in enumerate(answers):
        factor = late * (max(by_rank) / by_rank[rank] if is_even else 1.0)
        for op, times_here in rows:
            measured.setdefault(op, []).append(times_here * factor)
        if rows:
            arounds.append(around_rank * factor)
    return Profiled({op: mean(times) for op, times in measured.items()}, mean(arounds), by_rank)


def try_out(workload: Workload, placement: Placement, rank: int) -> None:
    """Run a rank's part of a pass alone, where it is told that memory lacks (torch.OutOfMemoryError), as on a GPU,
    before others wait for it in groups. For want of a host's memory a process is ended."""
    if workload.device.type == "cuda":
        with autocast(workload):
            _profiler(workload, placement, rank).try_out()


def _profiler(workload: Workload, placement: Placement, rank: int, groups: Groups | None = None) -> Profiler:
    return Profiler(
        placement,
        rank,
        workload.device,
        groups=groups,
        channels_last=workload.channels_last,
        batch_norm=workload.batch_norm,
        microbatches=workload.sizes,
        contents=workload.contents,
    )


def _of_each_rank(ranks: Sequence[Sequence[tuple[LocalOp, Times]]], without: set[LocalOp]) -> tuple[float, ...]:
    """Seconds that each rank takes for what all of them computed, each kind of it once. The median over all operations
    tells how fast a rank is from what has disturbed a single one."""
    means = [{op: mean([t for name, t in rows if name == op]).total for op in dict(rows)} for rows in ranks]
    common = [op for op in means[0] if op not in without and all(op in row for row in means)]
    medians = {op: median(row[op] for row in means) for op in common}
    total = sum(medians.values())
    large = [op for op in common if medians[op] > _SMALL * total]
    if not large:
        return ()
    return tuple(total * median(row[op] / medians[op] for op in large) for row in means)


def _without(times: Times, messages: InternalMessages, mesh: Mesh, links: Links) -> Times:
    if not messages.axes:
        return times
    link = links.of(mesh, messages.axes)
    ways = messages.forward, messages.backward
    sent = [sum(link.seconds(kind, size) for kind, size in way) for way in ways]
    issued = [link.host * len(way) for way in ways]
    return Times(*(max(0.0, whole - less) for whole, less in zip(times.numbers, sent + issued, strict=True)))


def _redistribution(
    placement: Placement, rank: int, transfer: tuple[Step, tuple[int, ...], torch.dtype, Times], links: Links
) -> tuple[LocalOp, Times]:
    step, shape, dtype, times = transfer
    mesh = placement.mesh
    place = mesh.coordinates(rank)
    op = moved(step, shape, dtype_name(dtype), times.backward > 0, mesh, place)
    axes = tuple(axis for axis in step.axes if mesh.sizes[axis] > 1)
    traffic, whole = step_elements(step, mesh, place, shape), op.inputs[0].bytes
    kind: Collective = "all_reduce" if step.kind in ("reduce", "copy") else "exchange"
    sizes = dtype.itemsize * traffic.forward, dtype.itemsize * traffic.backward
    sizes = {"reduce": (whole, 0), "copy": (0, whole)}.get(step.kind, sizes)
    ways = (((kind, size),) if size else () for size in sizes)
    return op, _without(times, InternalMessages(axes, *ways), mesh, links)


def local_op_of(workload: Workload, placement: Placement, placed: PlacedCall, rank: int) -> LocalOp:
    """What a rank computes for a call of a workload."""
    return local_op(placed, placement, rank, batch_norm=workload.batch_norm, microbatch=workload.microbatch)


def autocast(workload: Workload) -> torch.autocast:
    """Autocast as the workload is trained with it, if it is."""
    return torch.autocast(workload.device.type, workload.precision, enabled=workload.precision is not None)


_LAYERS = 4, 24
_WIDTH, _UPDATES, _ENOUGH = 16, 15, 6


def with_overhead(costs: Costs, workload: Workload, ranks: Ranks) -> Costs:
    """The costs, with the time of the engine for an update, and for each parameter whose gradient is exchanged. All
    ranks call it; one alone has nothing to exchange."""
    if ranks.num == 1:
        return costs
    what = "measuring the engine"
    few, many = (ranks.trying(what, partial(_residue, costs, workload, layers)) for layers in _LAYERS)
    per_parameter = max(0.0, (many - few) / (2 * (_LAYERS[1] - _LAYERS[0])))
    fixed = max(0.0, few - 2 * _LAYERS[0] * per_parameter)
    if not costs.on_cpu:  # it is the host's work, which a GPU that is busy does not wait for
        update = replace(costs.update, host=costs.update.host + fixed)
        return replace(costs, update=update, host_per_parameter=per_parameter)
    update = replace(costs.update, fixed=costs.update.fixed + fixed)
    return replace(costs, update=update, per_parameter=per_parameter)


def _residue(costs: Costs, workload: Workload, layers: int, ranks: Ranks) -> float:
    """The seconds of an update of a chain of layers that are not predicted."""
    plan = Plan.by_samples(ranks.num)
    images = torch.ones(2 * ranks.num, _WIDTH, device=workload.device)
    model = nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)]).to(workload.device)
    chain = workload_of(model, images, len(images))
    profiled = profile(chain, chain.place(plan), ranks, alone=False, links=costs.links, enough=_ENOUGH)
    loss = replace(costs.loss, per_pass=profiled.around.total, host=profiled.around.host)
    complete = replace(costs, times=lambda op: profiled.times.get(op, Times()), loss=loss)
    measured = _update(model, plan, images, workload.device)
    return max(ranks.gather(measured)) - predict(chain.place(plan), complete).total


def _update(model: nn.Module, plan: Plan, images: torch.Tensor, device: torch.device) -> float:
    take_part(model, plan, example=images[:2])
    samples = images[local_samples(model, len(images))]
    optimizer = momentum(list(model.parameters()))
    clock = DeviceClock(device)
    moments = [clock.now()]
    for _ in range(_UPDATES):
        optimizer.zero_grad()
        model(samples).sum().backward()
        optimizer.step()
        moments.append(clock.now())
    return median(clock.between(*pair) for pair in list(pairwise(moments))[3:])


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
        for axes in chain.from_iterable(combinations(mesh.axes, number + 1) for number in mesh.axes):
            ranks = first_group(mesh, axes)
            if len(ranks) > 1 and ranks not in links:
                missing.setdefault(ranks, axes)
        groups = Groups(mesh) if missing else None
        for ranks, axes in missing.items():
            assert groups is not None
            group = groups.of(axes)
            assert group is not None
            links[ranks] = _Probe(group, groups.world, device).measure(sizes)
    return Links(links)


class _Probe:
    """Measures one group, while the others over the same axes do so too."""

    def __init__(self, group: Group, world: Group, device: torch.device) -> None:
        self._group, self._world, self._device, self._clock = group, world, device, DeviceClock(device)
        self._ranks, self._place = collectives.size(group), collectives.place(group)
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
