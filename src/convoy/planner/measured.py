"""What the planner knows of the devices at hand: measured here, or looked up in the profile store.

The network is profiled under a few placements, which together show every layer with every strategy at its own sizes;
the optimizer is timed on tensors of its own. Devices that take unequal times for equal work are found out here, too.
"""

import contextlib
import hashlib
import inspect
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import nn

from convoy.comm.ranks import RankFailedError, Ranks
from convoy.engine.allocation import release_freed_memory
from convoy.engine.gradients.sharded import ELEMENTWISE
from convoy.errors import ConvoyError
from convoy.graph.graph import Call
from convoy.ops import OPERATIONS
from convoy.ops.memory import predict_memory
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs, HostCost
from convoy.planner.cost.device import Device, this_device
from convoy.planner.cost.gradients import Update
from convoy.planner.cost.link import Links
from convoy.planner.cost.local_op import VIEWS, LocalOp
from convoy.planner.cost.store import ProfileStore
from convoy.planner.cost.times import Times
from convoy.planner.profiling import ALIKE, Profiled, local_op_of, mean, profile, with_overhead
from convoy.planner.search.layers import compact
from convoy.planner.search.prices import Strategy, is_choosing
from convoy.planner.workload import MakeOptimizer, Workload
from convoy.plans.mesh import Mesh
from convoy.plans.place import Batch, Placement, Situation
from convoy.plans.plan import Plan
from convoy.units import shorten


def slowdowns_of(
    measured: Sequence[tuple[float, ...]], ranks: Ranks, store: ProfileStore | None, device: Device
) -> tuple[float, ...]:
    """How many times as long as in the mean each rank computes; empty where they are about equally fast.

    All ranks call it. Of ranks that nobody has measured it is empty too.

    Args:
        measured: for each profiling, the seconds that each rank took for equal work; empty where only one profiled.
        ranks: the ranks that profiled.
        store: knows it from before where nothing had to be profiled.
        device: the first rank's device.
    """
    name = "slowdown of " + hashlib.blake2b(repr(ranks.gather(_place())).encode(), digest_size=8).hexdigest()
    rows = [row for row in measured if len(row) == ranks.num > 1 and min(row) > 0]

    def known() -> tuple[float, ...]:
        if rows:
            found = [sum(own) for own in zip(*rows, strict=True)]
            if store is not None:
                with contextlib.suppress(OSError):  # a full disk is no reason not to plan
                    store.note(device, name, found)
            return tuple(found)
        noted = store.noted(device, name) if store is not None else None
        if not isinstance(noted, list) or len(noted) != ranks.num:
            return ()
        return tuple(one for one in noted if isinstance(one, float))

    if ranks.num == 1:
        return ()
    seconds = ranks.first(known)
    if len(seconds) < ranks.num or min(seconds) <= 0 or max(seconds) <= ALIKE * min(seconds):
        return ()
    return tuple(len(seconds) * own / sum(seconds) for own in seconds)


def _place() -> tuple[object, ...]:
    return platform.node(), sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()


ALONE = ("sample", "filter", "channel", "height", "width")
"""What all layers that can have on a mesh of one axis."""
TOGETHER = (("sample", "filter"), ("sample", "channel"), ("sample", "height"), ("filter", "filter"))
"""Likewise on a mesh of two."""


def placements(workload: Workload, mesh: Mesh) -> Iterator[tuple[str, Placement]]:
    """Placements to profile on a mesh, each with a name; a layer that cannot have the strategy is by samples, or
    whole where that cannot be either."""
    wanted: list[Strategy]
    match len(mesh.sizes):
        case 0:
            yield "serial", workload.place(Plan(mesh))
            return
        case 1:
            wanted = [(strategy,) for strategy in ALONE]
        case 2:
            wanted = list(TOGETHER)
        case _:
            wanted = []
    layers: dict[str, list[Call]] = {}
    for call in workload.graph.calls:
        if is_choosing(call):
            layers.setdefault(call.layer, []).append(call)
    seen: set[tuple[Strategy, ...]] = set()
    for strategy in wanted:
        given = {layer: _possible(workload, mesh, calls, strategy) for layer, calls in layers.items()}
        if strategy not in given.values() or tuple(given.values()) in seen:
            continue
        seen.add(tuple(given.values()))
        try:
            yield " · ".join(strategy), workload.place(compact(mesh, given))
        except ConvoyError:
            continue


def _possible(workload: Workload, mesh: Mesh, calls: list[Call], strategy: Strategy) -> Strategy:
    by_samples = tuple("sample" for _ in mesh.sizes)
    for candidate in (strategy, by_samples):
        axes = tuple(axis for axis, each in enumerate(candidate) if each == "sample")
        try:
            batch = Batch(mesh, axes, workload.parts(mesh.size(axes)) if axes else (range(workload.samples),))
            for call in calls:
                OPERATIONS[call.op].place(Situation(workload.graph, mesh, batch, call, candidate, {}))
        except ConvoyError:
            continue
        return candidate
    return tuple("replicate" for _ in mesh.sizes)


_POINTS = ((1, 2**24), (16, 2**20), (256, 2**16), (128, 64))
"""Tensors, and numbers in each: large ones do not fit into the caches, as in training."""


def check_optimizer(make: MakeOptimizer) -> None:
    """Refuse an optimizer whose updates cannot be timed.

    Raises:
        ConvoyError: its step calls a function that computes loss and gradients, as often as it likes.
    """
    optimizer = make([nn.Parameter(torch.zeros(1))])
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        name = type(optimizer).__name__
        raise ConvoyError(
            f"{name} computes the gradients several times in a step, so an update cannot be predicted: plan with "
            "another optimizer, e.g. SGD, and leave the optimizer's time out of account"
        )


def measure_update(make: MakeOptimizer, device: torch.device, repetitions: int = 5) -> Update:
    """Time the optimizer on tensors of several sizes.

    Args:
        make: makes it for some parameters.
        device: where they are.
        repetitions: how often each is timed; the median counts.
    """
    measured = []
    state = 0
    optimizer = None
    for tensors, numel in _POINTS:
        parameters = [nn.Parameter(torch.full((numel,), 0.5, device=device)) for _ in range(tensors)]
        optimizer = make(parameters)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()  # makes the state
        seconds = median(_time(optimizer, device) for _ in range(repetitions))
        measured.append((tensors * numel * 4, tensors, seconds))
        held = (t for entries in optimizer.state.values() for t in entries.values() if isinstance(t, torch.Tensor))
        state = max(state, round(sum(t.numel() for t in held) / (tensors * numel)))
    return Update.fit(measured, state=float(state), divisible=type(optimizer) in ELEMENTWISE)


def _time(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


_ROOM = 0.6
_LONGEST = 60
"""Characters of a plan in what is said of a profiling."""

Progress = Callable[[str, int, int], None]
"""Is told what is done, how much of it, and of how much."""


@dataclass
class Knowledge:
    """Times on the devices at hand.

    Attributes:
        alone: costs where one device computes and the others of the host rest.
        together: where all devices of the host compute at the same time.
        notes: sentences on what could not be measured.
        slowdowns: how many times as long as in the mean each rank computes; empty where they are about equally fast.
    """

    alone: Costs
    together: Costs
    notes: tuple[str, ...] = ()
    slowdowns: tuple[float, ...] = ()


@dataclass(frozen=True)
class Job:
    """A profiling.

    Attributes:
        name: for people.
        workload: the training that is placed.
        alone: whether one device does it while the others rest.
    """

    name: str
    workload: Workload
    placement: Placement
    alone: bool


def jobs_for(workload: Workload, meshes: Sequence[Mesh], plans: Sequence[Plan] = ()) -> list[Job]:
    """What is profiled: one device by itself, and the plans that are given, or what a search of the meshes needs."""
    alone = workload.alone or workload
    jobs = [Job(f"{name}, one device", alone, placement, True) for name, placement in placements(alone, Mesh((), ()))]
    for plan in plans:
        if plan.mesh.num_devices > 1:
            jobs.append(Job(shorten(str(plan), _LONGEST), workload, workload.place(plan), False))
    for mesh in () if plans else meshes:
        if mesh.num_devices > 1:
            jobs += [Job(name, workload, placement, False) for name, placement in placements(workload, mesh)]
    return jobs


def measure(
    workload: Workload,
    jobs: Sequence[Job],
    ranks: Ranks,
    links: Links,
    store: ProfileStore | None = None,
    progress: Progress = lambda what, done, total: None,
    per_transfer: float = 0.0,
    room: float | None = None,
) -> Knowledge:
    """Profile the network on the devices at hand; all ranks call it.

    What the store has is not measured again, and what takes more memory than there is is left out.

    Args:
        workload: what is to be trained.
        jobs: the profiling runs that times are needed from.
        ranks: the devices at hand.
        links: between the devices of the meshes.
        store: measurements from before; None keeps nothing.
        progress: is told of every profiling.
        per_transfer: seconds of the engine for a redistribution in one direction.
        room: bytes that a rank has; what needs more than `_ROOM` of them is not profiled, as what kernels hold while
            they run comes on top.

    Raises:
        RankFailedError: a rank has failed otherwise than for want of memory.
    """
    if room is not None:
        jobs = [job for job in jobs if max(each.total for each in predict_memory(job.placement)) <= _ROOM * room]
    devices = {alone: device_of(workload, 1 if alone else ranks.on_host) for alone in (True, False)}
    known = {alone: ranks.first(partial(_stored, store, devices[alone])) for alone in (True, False)}
    outside: dict[bool, list[Times]] = {True: [], False: []}
    notes: list[str] = []
    seconds: list[tuple[float, ...]] = []
    _give_back(workload.device)  # what was planned or trained before, whose blocks are of other sizes
    for number, job in enumerate(jobs):
        progress(f"profiling {job.name}", number, len(jobs))
        if all(one in known[job.alone] for one in _pieces(job, ranks)):
            continue
        profiled = partial(_profiled, job, links, partial(_passed, progress, job, number, len(jobs)))
        try:
            found = ranks.trying(f"profiling {job.name}", profiled)
        except RankFailedError as error:
            if not error.out_of_memory:
                raise
            notes.append(f"{error}: its layers are predicted from what else was profiled")
            continue
        known[job.alone] = found.times | known[job.alone]  # of several the first counts: `sample`
        outside[job.alone].append(found.around)
        seconds.append(found.by_rank)
        if store is not None and ranks.rank == 0:
            with contextlib.suppress(OSError):  # a full disk is no reason not to plan
                store.put(devices[job.alone], found.times)
                around = [found.around.forward, found.around.backward]
                store.note(devices[job.alone], _around_of(job.workload, job.alone), around)
    _give_back(workload.device)
    progress("profiling", len(jobs), len(jobs))
    if not any(known.values()):
        notes.append("nothing could be profiled in the memory there is: times are those of a typical slow core")
    timed = partial(measure_update, workload.optimizer, workload.device)
    updates = {True: ranks.first(timed)}
    everyone = ranks.gather(ranks.trying("timing the optimizer", lambda _: timed())) if ranks.num > 1 else []
    updates[False] = max(everyone, key=lambda update: update.per_byte, default=updates[True])
    found_costs = {}
    for alone in (True, False):
        moved = any(one.op == "redistribute" for one in known[alone])  # with what the engine takes for it
        name = _around_of((workload.alone if alone else None) or workload, alone)
        found_costs[alone] = Costs(
            times=Calibrated(known[alone] or known[not alone]),
            links=links,
            update=updates[alone],
            loss=ranks.first(partial(_around, outside[alone], store, devices[alone], name)),
            batch_norm=workload.batch_norm,
            microbatch=workload.microbatch,
            on_cpu=workload.device.type == "cpu",
            per_transfer=Times() if moved else Times(per_transfer, per_transfer),
        )
    together = with_overhead(found_costs[False], workload, ranks)
    return Knowledge(found_costs[True], together, tuple(notes), slowdowns_of(seconds, ranks, store, devices[False]))


def _give_back(device: torch.device) -> None:
    if device.type == "cpu":
        release_freed_memory()


def _profiled(job: Job, links: Links, passed: Callable[[int], None], ranks: Ranks) -> Profiled:
    together = not job.alone and job.placement.mesh.num_devices == ranks.num
    return profile(job.workload, job.placement, ranks, job.alone, links, together, passed=passed)


def _passed(progress: Progress, job: Job, done: int, total: int, number: int) -> None:
    progress(f"profiling {job.name}, pass {number}", done, total)


def _pieces(job: Job, ranks: Ranks) -> set[LocalOp]:
    """What the ranks compute in a profiling, but for what takes no time."""
    placement = job.placement
    places = {0} if job.alone else set(ranks.places(placement.mesh))
    found = (local_op_of(job.workload, placement, placed, place) for place in places for placed in placement.calls)
    return {one for one in found if not one.is_empty and one.op not in VIEWS}


def device_of(workload: Workload, neighbours: int) -> Device:
    """The device here as the store names it, where so many ranks of the host compute at once."""
    weights = next((value.dtype for value in workload.graph.parameters()), torch.float32)
    precision = str(workload.precision or weights).removeprefix("torch.")
    return this_device(
        workload.device, precision=precision, channels_last=workload.channels_last, neighbours=neighbours
    )


def _stored(store: ProfileStore | None, device: Device) -> dict[LocalOp, Times]:
    return {} if store is None else store.times(device)


def _around_of(workload: Workload, alone: bool) -> str:
    return f"around {workload.name} {workload.samples} {'alone' if alone else 'together'}"


def _around(measured: Sequence[Times], store: ProfileStore | None, device: Device, name: str) -> HostCost:
    if measured:
        return HostCost(per_pass=mean(measured).total)
    noted = store.noted(device, name) if store is not None else None
    return HostCost(per_pass=sum(noted)) if isinstance(noted, list) else HostCost()
