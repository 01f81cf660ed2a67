"""Profiling on the devices at hand: how long every operation of a placement takes, and what the engine itself takes.

The engine's own time in an update shows on networks so small that there is little else.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import count, pairwise
from statistics import median

import torch
from torch import nn

from convoy.comm.groups import Groups
from convoy.comm.ranks import Ranks
from convoy.engine.parallelize import local_samples, take_part
from convoy.engine.profiling import OUTSIDE, CallTimes, Profiler
from convoy.engine.watched import DeviceClock
from convoy.planner.cost.costs import Costs, Times
from convoy.planner.cost.link import Collective, Links
from convoy.planner.cost.local_op import VIEWS, LocalOp, dtype_name, local_op
from convoy.planner.cost.prediction import predict
from convoy.planner.cost.program import InternalMessages, internal_messages, moved
from convoy.planner.workload import Workload, momentum, workload_of
from convoy.plans.mesh import Mesh
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
        around = Times(*astuple(times[OUTSIDE]))
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


def _without(times: CallTimes, messages: InternalMessages, mesh: Mesh, links: Links) -> Times:
    if not messages.axes:
        return Times(*astuple(times))
    link = links.of(mesh, messages.axes)
    ways = messages.forward, messages.backward
    sent = [sum(link.seconds(kind, size) for kind, size in way) for way in ways]
    issued = [link.host * len(way) for way in ways]
    return Times(*(max(0.0, whole - less) for whole, less in zip(astuple(times), sent + issued, strict=True)))


def _redistribution(
    placement: Placement, rank: int, transfer: tuple[Step, tuple[int, ...], torch.dtype, CallTimes], links: Links
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


def mean(times: Sequence[Times]) -> Times:
    """The mean; of none, no time."""
    total, part = sum(times, Times()), 1 / max(1, len(times))
    return Times(*(seconds * part for seconds in total.numbers))


def local_op_of(workload: Workload, placement: Placement, placed: PlacedCall, rank: int) -> LocalOp:
    """What a rank computes for a call of a workload."""
    return local_op(placed, placement, rank, batch_norm=workload.batch_norm, microbatch=workload.microbatch)


@contextmanager
def autocast(workload: Workload) -> Iterator[None]:
    """Autocast as the workload is trained with it, if it is."""
    if workload.precision is None:
        yield
        return
    with torch.autocast(workload.device.type, workload.precision):
        yield


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
