"""What the planner knows of the devices at hand: measured here, or looked up in the profile store.

The network is profiled as a whole: by samples, filters and channels, and under the plans that are given or that the
search proposes. The optimizer is timed on tensors of its own. Devices that take unequal times for equal work are found
out here, too.
"""

import contextlib
import hashlib
import inspect
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median

import torch
from torch import nn

from convoy.comm.ranks import Ranks
from convoy.engine.allocation import release_freed_memory
from convoy.engine.clock import DeviceClock
from convoy.errors import ConvoyError, RankFailedError
from convoy.graph.graph import Call
from convoy.ops import OPERATIONS
from convoy.ops.memory import predict_memory
from convoy.ops.onednn import has_packing
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs, HostCost
from convoy.planner.cost.device import Device, this_device
from convoy.planner.cost.gradients import Update, issuing
from convoy.planner.cost.link import Links
from convoy.planner.cost.local_op import VIEWS, LocalOp
from convoy.planner.cost.store import ProfileStore
from convoy.planner.cost.times import Times
from convoy.planner.profiling import ALIKE, Profiled, local_op_of, mean, profile, with_overhead
from convoy.planner.search.layers import compact
from convoy.planner.search.prices import Strategy, is_choosing
from convoy.planner.workload import MakeOptimizer, Workload, memory_of_updates
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


_PROFILED = ("sample", "filter", "channel")
"""Of all layers that can have them, one after the other, in the profilings that a search begins with."""


def placements(workload: Workload, mesh: Mesh) -> Iterator[tuple[str, Placement]]:
    """Placements to profile on a mesh of one axis, each with a name; a layer that cannot have the strategy is by
    samples, or whole where that cannot be either."""
    layers: dict[str, list[Call]] = {}
    for call in workload.graph.calls:
        if is_choosing(call):
            layers.setdefault(call.layer, []).append(call)
    seen: set[tuple[Strategy, ...]] = set()
    for strategy in _PROFILED:
        given = {layer: _possible(workload, mesh, calls, strategy) for layer, calls in layers.items()}
        if (strategy,) not in given.values() or tuple(given.values()) in seen:
            continue
        seen.add(tuple(given.values()))
        try:
            yield strategy, workload.place(compact(mesh, given))
        except ConvoyError:
            continue


def _possible(workload: Workload, mesh: Mesh, calls: list[Call], wanted: str) -> Strategy:
    for strategy in (wanted, "sample"):
        axes = (0,) if strategy == "sample" else ()
        try:
            batch = Batch(mesh, axes, workload.parts(mesh.size(axes)) if axes else (range(workload.samples),))
            for call in calls:
                OPERATIONS[call.op].place(Situation(workload.graph, mesh, batch, call, (strategy,), {}))
        except ConvoyError:
            continue
        return (strategy,)
    return ("replicate",)


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
    measured, issued = [], []
    clock = DeviceClock(device)
    for tensors, numel in _POINTS:
        parameters = [nn.Parameter(torch.full((numel,), 0.5, device=device)) for _ in range(tensors)]
        optimizer = make(parameters)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()  # makes the state
        spent = [clock.spent(optimizer.step, in_a_row=1) for _ in range(repetitions)]
        measured.append((tensors * numel * 4, tensors, median(one.device for one in spent)))
        issued.append((tensors, median(one.host for one in spent)))
    held = memory_of_updates(make)
    found = Update.fit(measured, state=held.state, divisible=held.divisible)
    host, host_per_tensor = issuing(issued)
    return replace(found, host=host, host_per_tensor=host_per_tensor)


_ROOM = 0.6
_LONGEST = 60
"""Characters of a plan in what is said of a profiling."""

Progress = Callable[[str, int, int], None]
"""Is told what is done, how much of it, and of how much."""


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
    """What is profiled to begin with: one device by itself, and the plans that are given, or every layer by samples, by
    filters and by channels over all devices, from which the search's costs of all else follow."""
    alone = workload.alone or workload
    jobs = [Job("serial, one device", alone, alone.place(Plan(Mesh((), ()))), True)]
    jobs += [plan_job(workload, plan) for plan in plans if plan.mesh.num_devices > 1]
    for mesh in () if plans else meshes[:1]:
        if mesh.num_devices > 1:
            jobs += [Job(name, workload, placement, False) for name, placement in placements(workload, mesh)]
    return jobs


def plan_job(workload: Workload, plan: Plan, passes: int | None = None) -> Job:
    """The profiling of a plan on all devices. With stages, each runs the whole network on a pass of theirs.

    Args:
        workload: what is to be trained.
        plan: the plan.
        passes: through its stages; None for as many as go well through them.
    """
    workload = workload.through(plan.num_stages, passes, plan.parts)
    return Job(shorten(str(plan), _LONGEST), workload, workload.place(plan), False)


class Measurements:
    """Times on the devices at hand, looked up or measured; every profiling adds to them. All ranks call it alike.

    Args:
        workload: what is to be trained.
        ranks: the devices at hand.
        links: between the devices of the meshes.
        store: measurements from before; None keeps nothing.
        progress: is told of every profiling.
        per_transfer: seconds of the engine for a redistribution in one direction.
        room: bytes that a rank has; what needs more than `_ROOM` of them is not profiled, as what kernels hold while
            they run comes on top.

    Attributes:
        notes: sentences on what could not be measured.
        longest_s: seconds that the longest profiling has taken.
    """

    def __init__(
        self,
        workload: Workload,
        ranks: Ranks,
        links: Links,
        store: ProfileStore | None = None,
        progress: Progress = lambda what, done, total: None,
        per_transfer: float = 0.0,
        room: float = math.inf,
    ) -> None:
        self._workload, self._ranks, self._links, self._store = workload, ranks, links, store
        self._progress, self._per_transfer, self._room = progress, per_transfer, room
        self._devices = {alone: device_of(workload, 1 if alone else ranks.on_host) for alone in (True, False)}
        self._times = {alone: ranks.first(partial(_stored, store, self._devices[alone])) for alone in (True, False)}
        self._around: dict[bool, list[Times]] = {True: [], False: []}
        self._by_rank: list[tuple[float, ...]] = []
        self._count = 0
        self.notes: list[str] = []
        self.longest_s = 0.0
        self.give_back_memory()  # of what was planned or trained before, whose blocks are of other sizes

    def profile(self, jobs: Sequence[Job]) -> None:
        """Profile the network, but for what is known or takes more memory than there is.

        Raises:
            RankFailedError: a rank has failed otherwise than for want of memory.
        """
        jobs = [job for job in jobs if self._fits(job)]
        total = self._count + len(jobs)
        for job in jobs:
            self._progress(f"profiling {job.name}", self._count, total)
            if not all(one in self._times[job.alone] for one in self._local_ops(job)):
                self._run(job, total)
            self._count += 1

    @property
    def is_empty(self) -> bool:
        """Whether no operation's time is known."""
        return not any(self._times.values())

    def give_back_memory(self) -> None:
        """Give back what earlier work has freed."""
        release_freed_memory(self._workload.device)

    def _fits(self, job: Job) -> bool:
        return max(each.total for each in predict_memory(job.placement)) <= _ROOM * self._room

    def _run(self, job: Job, total: int) -> None:
        together = not job.alone and job.placement.mesh.num_devices == self._ranks.num
        done = self._count

        def passed(number: int) -> None:
            self._progress(f"profiling {job.name}, pass {number}", done, total)

        def work(ranks: Ranks) -> Profiled:
            return profile(job.workload, job.placement, ranks, job.alone, self._links, together, passed=passed)

        start = time.monotonic()
        try:
            found = self._ranks.trying(f"profiling {job.name}", work)
        except RankFailedError as error:
            if not error.out_of_memory:
                raise
            self.give_back_memory()
            self.notes.append(f"{error}: its layers are predicted from what else was profiled")
            return
        self.longest_s = max(self.longest_s, time.monotonic() - start)
        self._times[job.alone] = found.times | self._times[job.alone]  # of several the first counts: `sample`
        self._around[job.alone].append(found.around)
        self._by_rank.append(found.by_rank)
        if self._store is not None and self._ranks.rank == 0:
            device = self._devices[job.alone]
            with contextlib.suppress(OSError):  # a full disk is no reason not to plan
                self._store.put(device, found.times)
                self._store.note(device, _around_of(job.workload, job.alone), list(found.around.numbers))

    def _local_ops(self, job: Job) -> list[LocalOp]:
        """What the ranks compute in a profiling, but for what takes no time."""
        placement = job.placement
        places = dict.fromkeys([0] if job.alone else self._ranks.places(placement.mesh))
        found = (local_op_of(job.workload, placement, placed, place) for place in places for placed in placement.calls)
        return list(dict.fromkeys(one for one in found if not one.is_empty and one.op not in VIEWS))

    def lacking(self, job: Job) -> float:
        """The part of a job's computing time that was not measured, as it is predicted; 0 where memory lacks for it."""
        known = self._times[job.alone]
        times = Calibrated(known)
        seconds = {one: times(one).total for one in self._local_ops(job)} if self._fits(job) else {}
        return sum(own for one, own in seconds.items() if one not in known) / (sum(seconds.values()) or 1.0)

    def slowdowns(self) -> tuple[float, ...]:
        """How many times as long as in the mean each rank computes; empty where they are about equally fast."""
        return slowdowns_of(self._by_rank, self._ranks, self._store, self._devices[False])

    def costs(self, alone: bool) -> Costs:
        """What is known by now of one device while the others of the host rest, or while all of them compute."""
        times = Calibrated(self._times[alone] or self._times[not alone])
        return replace(
            self._without_times[alone], times=times, loss=self._loss(alone), per_transfer=self._engine(alone)
        )

    def _engine(self, alone: bool) -> Times:
        """What the engine takes for a redistribution, where that is not in the times of those that were measured."""
        moved = any(one.op == "redistribute" for one in self._times[alone])
        return Times() if moved else Times(self._per_transfer, self._per_transfer)

    def _loss(self, alone: bool) -> HostCost:
        workload = (self._workload.alone if alone else None) or self._workload
        name = _around_of(workload, alone)
        return self._ranks.first(partial(_around, self._around[alone], self._store, self._devices[alone], name))

    @cached_property
    def _without_times(self) -> dict[bool, Costs]:
        """Costs of the optimizer and the engine; these are measured once."""
        workload, ranks = self._workload, self._ranks
        self.give_back_memory()
        timed = partial(measure_update, workload.optimizer, workload.device)
        first = ranks.first(timed)
        everyone = ranks.gather(ranks.trying("timing the optimizer", lambda _: timed())) if ranks.num > 1 else []
        slowest = max(everyone, key=lambda update: update.per_byte, default=first)
        alone = Costs(
            times=Calibrated({}),
            links=self._links,
            update=first,
            batch_norm=workload.batch_norm,
            microbatch=workload.microbatch,
            on_cpu=workload.device.type == "cpu",
            recorded=workload.recorded,
            lays_out=workload.device.type == "cpu"
            and workload.channels_last
            and workload.precision in (None, torch.bfloat16)
            and has_packing(workload.precision or torch.float32),
            per_transfer=self._engine(False),
        )
        return {True: alone, False: with_overhead(replace(alone, update=slowest), workload, ranks)}


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
        return HostCost(per_pass=mean(measured).total, host=mean(measured).host)
    noted = store.noted(device, name) if store is not None else None
    return HostCost(per_pass=sum(noted[:2]), host=sum(noted[2:])) if isinstance(noted, list) else HostCost()
