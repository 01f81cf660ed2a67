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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch
from torch import nn

from convoy.comm.ranks import Ranks
from convoy.engine.allocation import release_freed_memory
from convoy.engine.watched import DeviceClock
from convoy.errors import ConvoyError, RankFailedError
from convoy.graph.graph import Call
from convoy.launch.host import HostLoad, HostWatch
from convoy.ops import OPERATIONS
from convoy.ops.memory import predict_memory
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs, HostCost, Roofline, Times
from convoy.planner.cost.gradients import Update, issuing
from convoy.planner.cost.link import Links
from convoy.planner.cost.local_op import VIEWS, LocalOp
from convoy.planner.cost.store import Device, ProfileStore, this_device
from convoy.planner.profiling import ALIKE, Profiled, local_op_of, mean, profile, with_overhead
from convoy.planner.search.layers import compact
from convoy.planner.search.prices import Strategy, is_choosing
from convoy.planner.workload import MakeOptimizer, Workload, memory_of_updates
from convoy.plans.mesh import Mesh
from convoy.plans.place import Batch, Placement, Situation
from convoy.plans.plan import Plan, plan_text
from convoy.units import plural, shorten

# Of all layers that can have them, one after the other, in the profilings that a search begins with
_PROFILED = ("sample", "filter", "channel")


def plans_to_profile(workload: Workload, mesh: Mesh) -> Iterator[tuple[str, Plan]]:
    """Plans to profile on a mesh of one axis, each with a name; a layer that cannot have the strategy is by samples, or
    whole where that cannot be either."""
    layers: dict[str, list[Call]] = {}
    for call in workload.graph.calls:
        if is_choosing(call):
            layers.setdefault(call.layer, []).append(call)
    seen: set[tuple[Strategy, ...]] = set()
    for strategy in _PROFILED:
        layer_strategies = {layer: _possible(workload, mesh, calls, strategy) for layer, calls in layers.items()}
        if (strategy,) not in layer_strategies.values() or tuple(layer_strategies.values()) in seen:
            continue
        seen.add(tuple(layer_strategies.values()))
        with contextlib.suppress(ConvoyError):
            workload.place(plan := compact(mesh, layer_strategies))
            yield strategy, plan


def _possible(workload: Workload, mesh: Mesh, calls: list[Call], preferred: str) -> Strategy:
    for strategy in (preferred, "sample"):
        axes = (0,) if strategy == "sample" else ()
        try:
            batch = Batch(mesh, axes, workload.parts(mesh.size(axes)) if axes else (range(workload.samples),))
            for call in calls:
                OPERATIONS[call.op].place(Situation(workload.graph, mesh, batch, call, (strategy,), {}))
        except ConvoyError:
            continue
        return (strategy,)
    return ("replicate",)


# Tensors, and numbers in each: large ones do not fit into the caches, as in training
_POINTS = ((1, 2**24), (16, 2**20), (256, 2**16), (128, 64))


def check_optimizer(make: MakeOptimizer) -> None:
    """Refuse an optimizer whose step calls a function that computes loss and gradients, as often as it likes: its
    updates cannot be timed."""
    optimizer = make([nn.Parameter(torch.zeros(1))])
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        name = type(optimizer).__name__
        raise ConvoyError(
            f"{name} computes the gradients several times in a step, so an update cannot be predicted: plan with "
            "another optimizer, e.g. SGD, and leave the optimizer's time out of account"
        )


def measure_update(make: MakeOptimizer, device: torch.device, repetitions: int = 5) -> Update:
    """Time the optimizer on tensors of several sizes; the median of the repetitions counts."""
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
    update = Update.fit(measured, state=held.state)
    host, host_per_tensor = issuing(issued)
    return replace(update, host=host, host_per_tensor=host_per_tensor)


# The part of a rank's memory that the tensors of a pass may take: what kernels hold, and holes between blocks, have
# been up to 1.2 times that
_ROOM = 0.65
# Kept times that are so many times those of now, or the other way round, are of a machine in another state
_PACE = 1.25
_MATRIX, _REACHED = 512, 0.5  # rows of a matrix, and how much of the speed of its product layers reach, about
_ENOUGH_MORE = 1.2  # so many times as much memory is another try for what was killed
_FROM_OTHERS = "its layers are predicted from what else was profiled"
LONGEST = 60  # characters of a plan in what is said of a profiling

Progress = Callable[[str, int, int], None]  # is told what is done, how much of it, and of how much


@dataclass(frozen=True)
class Job:
    """A profiling of a workload under a plan; `alone` by one device while the others rest."""

    name: str  # for people
    workload: Workload
    plan: Plan
    alone: bool = False

    @cached_property
    def placement(self) -> Placement:
        return self.workload.place(self.plan)

    @property
    def memory(self) -> int:
        """Bytes of a pass on the rank that needs most, but for what kernels hold."""
        return max(rank.total for rank in predict_memory(self.placement))

    @property
    def mark(self) -> str:
        """The name under which a store knows that the job has begun."""
        workload = self.workload
        return f"began {workload.name} {workload.sample} {workload.samples} {plan_text(self.plan)}"

    def halved(self) -> "Job | None":
        """The job in passes of half as many samples; None where there are none."""
        workload, samples = self.workload, self.workload.samples // 2
        if workload.resized is None or samples < 2 * self.plan.parts:  # a single sample may have no statistics
            return None
        smaller = workload.resized(samples)
        microbatch = min(workload.microbatch, samples // self.plan.parts)  # so that each part has one
        return replace(self, workload=replace(smaller, microbatch=microbatch))


def jobs_for(workload: Workload, meshes: Sequence[Mesh], plans: Sequence[Plan] = ()) -> list[Job]:
    """What is profiled to begin with: one device by itself, and the requested plans, or every layer by samples, by
    filters and by channels over all devices, from which the search's costs of all else follow."""
    alone = workload.alone or workload
    jobs = [Job("serial, one device", alone, Plan(Mesh((), ())), True)]
    jobs += [plan_job(workload, plan) for plan in plans if plan.mesh.num_devices > 1]
    for mesh in () if plans else meshes[:1]:
        if mesh.num_devices > 1:
            jobs += [Job(name, workload, plan) for name, plan in plans_to_profile(workload, mesh)]
    return jobs


def plan_job(workload: Workload, plan: Plan, passes: int | None = None) -> Job:
    """The profiling of a plan on all devices. With stages, each runs the whole network on one of their passes."""
    return Job(shorten(str(plan), LONGEST), workload.through(plan.num_stages, passes, plan.parts), plan)


class Measurements:
    """Times on the devices at hand, looked up or measured; every profiling adds to them. All ranks call it alike."""

    def __init__(
        self,
        workload: Workload,
        ranks: Ranks,
        store: ProfileStore | None = None,
        progress: Callable[[str], None] = lambda what: None,
        room: float = math.inf,
    ) -> None:
        self._workload, self._ranks, self._store, self._progress, self.room = workload, ranks, store, progress, room
        self.links = Links()
        self.per_transfer = 0.0  # seconds of the engine for a redistribution in one direction
        self._devices = {alone: device_of(workload, 1 if alone else ranks.on_host) for alone in (True, False)}
        self._kept = {
            alone: ranks.first(partial(store.times, device)) if store is not None else {}
            for alone, device in self._devices.items()
        }
        self._new: dict[bool, dict[LocalOp, Times]] = {True: {}, False: {}}
        self._around: dict[bool, list[Times]] = {True: [], False: []}
        self._by_rank: list[tuple[float, ...]] = []
        self.notes: list[str] = []  # sentences on what could not be measured
        self.loads: list[HostLoad] = []  # of each profiling, by rank
        self.longest_s = 0.0  # of the longest profiling

    def profile(self, jobs: Sequence[Job], afresh: bool = False) -> None:
        """Profile the network in passes that fit into memory, but for what is known, or `afresh` all of it. A
        RankFailedError where a rank has failed otherwise than for want of memory."""
        for job in jobs:
            self._progress(f"profiling {job.name}")
            fitting = self._fitting(job)
            if fitting is None:
                self._note(f"{job.name} was not profiled, for want of memory: {_FROM_OTHERS}")
                continue
            if fitting is not job:
                number = plural(fitting.workload.samples, "sample")
                self._note(f"{job.name} was profiled in passes of {number}, not {job.workload.samples}, for memory")
            if not self._is_known(fitting, self._new if afresh else self._times):
                self._run(fitting, afresh)

    def _is_known(self, job: Job, times: Mapping[bool, Mapping[LocalOp, Times]]) -> bool:
        return all(one in times[job.alone] for one in self._local_ops(job))

    @property
    def _times(self) -> dict[bool, dict[LocalOp, Times]]:
        return {alone: self._kept[alone] | self._new[alone] for alone in (True, False)}

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    @property
    def is_empty(self) -> bool:
        return not any(self._times.values())

    def give_back_memory(self) -> None:
        release_freed_memory(self._workload.device)

    def _fitting(self, job: Job) -> Job | None:
        """A job in passes that fit into memory, and at which no process was killed where there was as little; None
        where even the smallest do not."""
        smaller: Job | None = job
        room = self.room * (self._ranks.on_host if job.alone and self._workload.device.type == "cpu" else 1)
        while smaller is not None and (smaller.memory > _ROOM * room or self.room <= self._ended(smaller)):
            smaller = smaller.halved()
        return smaller

    def _noted(self, alone: bool, name: str) -> Any:
        return self._store.noted(self._devices[alone], name) if self._store is not None else None

    def _keep(self, write: Callable[[ProfileStore], object]) -> None:
        if self._store is not None and self._ranks.rank == 0:
            with contextlib.suppress(OSError):  # a full disk is no reason not to plan
                write(self._store)

    def _ended(self, job: Job) -> float:
        """Bytes that a rank had when a process was ended from outside in the middle of this job; 0 where none was."""
        return _ENOUGH_MORE * float(self._ranks.first(partial(self._noted, job.alone, job.mark)) or 0.0)

    @contextmanager
    def attempt(self, job: Job) -> Iterator[None]:
        """While entered, the store knows that a job has begun; where a process is killed in it, for ever. A ConvoyError
        where one was, with as little memory."""
        if self.room <= self._ended(job):
            raise ConvoyError("a process was killed in it when there was as little memory")
        self._mark(job, self.room)
        try:
            yield
        finally:
            self._mark(job, None)

    def _mark(self, job: Job, room: float | None) -> None:
        self._keep(lambda store: store.note(self._devices[job.alone], job.mark, room))

    def _run(self, job: Job, afresh: bool) -> None:
        together = not job.alone and job.placement.mesh.num_devices == self._ranks.num

        def passed(number: int) -> None:
            self._progress(f"profiling {job.name}, pass {number}")

        def work(ranks: Ranks) -> Profiled:
            return profile(job.workload, job.placement, ranks, job.alone, self.links, together, passed=passed)

        start, watch = time.monotonic(), HostWatch()
        try:
            with self.attempt(job):
                profiled = self._ranks.trying(f"profiling {job.name}", work)
        except RankFailedError as error:
            if not error.out_of_memory:
                raise
            self._note(f"{error}: {_FROM_OTHERS}")
            return
        finally:
            self.give_back_memory()
        self.longest_s = max(self.longest_s, time.monotonic() - start)
        loads = self._ranks.gather(watch.read())
        if afresh:
            self._compare(job.alone, profiled.times)
        self._new[job.alone] = profiled.times | self._new[job.alone]  # of several the first counts: `sample`
        self._around[job.alone].append(profiled.around)
        self._by_rank.append(profiled.by_rank)
        self.loads += loads
        if not any(load.is_disturbed for load in loads):
            device, around = self._devices[job.alone], _around_of(job.workload, job.alone)
            self._keep(lambda store: store.put(device, profiled.times))
            self._keep(lambda store: store.note(device, around, list(profiled.around.numbers)))

    def _compare(self, alone: bool, times_now: Mapping[LocalOp, Times]) -> None:
        """Bring kept times to the machine's pace of now, or forget them where it is another one."""
        times_before = self._kept[alone]
        shared = [one for one in times_now if one in times_before]
        before, now = (sum(times[one].total for one in shared) for times in (times_before, times_now))
        if not before or not now:
            return
        if max(before, now) <= _PACE * min(before, now):
            self._kept[alone] = {one: times * (now / before) for one, times in times_before.items()}
            return
        self._kept[alone] = {}
        self._note(
            f"times that were kept of earlier plans and runs are {before / now:.2f} × those of now, so all is measured "
            "anew: convoy profile --clear forgets them"
        )
        self._keep(lambda store: store.clear(self._devices[alone]))

    def _local_ops(self, job: Job) -> list[LocalOp]:
        placement = job.placement
        places = dict.fromkeys([0] if job.alone else self._ranks.places(placement.mesh))
        ops = (local_op_of(job.workload, placement, placed, place) for place in places for placed in placement.calls)
        return list(dict.fromkeys(one for one in ops if not one.is_empty and one.op not in VIEWS))

    def lacking(self, job: Job) -> float:
        """The part of a job's computing time that was not measured, as it is predicted; 0 where memory lacks for it."""
        measured, fitting = self._times[job.alone], self._fitting(job)
        times = Calibrated(measured)
        seconds = {one: times(one).total for one in self._local_ops(fitting)} if fitting is not None else {}
        return sum(of_op for one, of_op in seconds.items() if one not in measured) / (sum(seconds.values()) or 1.0)

    def unknown(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs of which something was not measured, and the first two, which are measured afresh."""
        return [*jobs[:2], *(job for job in jobs[2:] if not self._is_known(job, self._times))]

    def expected_s(self, job: Job) -> float:
        """About the seconds that a pass will take, by what is known."""
        times = Calibrated(self._times[job.alone] or self._times[not job.alone], self._roofline)
        return sum(times(one).total for one in self._local_ops(self._fitting(job) or job))

    @cached_property
    def _roofline(self) -> Roofline | None:
        """A rough roofline of the device, by one product of matrices; None where more is known."""
        if any(self._times.values()):
            return None
        matrix = torch.full((_MATRIX, _MATRIX), 0.5, device=self._workload.device)
        clock = DeviceClock(self._workload.device)
        spent = min(clock.spent(lambda: matrix @ matrix, in_a_row=1).device for _ in range(20))  # some undisturbed
        return Roofline(_REACHED * 2 * _MATRIX**3 / max(spent, 1e-9), 1e10, 1e-5)

    def slowdowns(self) -> tuple[float, ...]:
        """How many times as long as in the mean each rank computes, by the seconds that each took for equal work; empty
        where they are about equally fast, or not measured. All ranks call it. Where nothing had to be profiled, the
        store may know it from before."""
        if self._ranks.num == 1:
            return ()
        place = platform.node(), sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
        name = "slowdown of " + hashlib.blake2b(repr(self._ranks.gather(place)).encode(), digest_size=8).hexdigest()
        rows = [row for row in self._by_rank if len(row) == self._ranks.num and min(row) > 0]
        seconds = [sum(of_rank) for of_rank in zip(*rows, strict=True)]
        if rows:
            self._keep(lambda store: store.note(self._devices[False], name, seconds))
        seconds = self._ranks.first(lambda: seconds if rows else self._noted(False, name) or [])
        if len(seconds) < self._ranks.num or min(seconds) <= 0 or max(seconds) <= ALIKE * min(seconds):
            return ()
        return tuple(len(seconds) * of_rank / sum(seconds) for of_rank in seconds)

    def costs(self, alone: bool) -> Costs:
        """What is known by now of one device while the others of the host rest, or while all of them compute."""
        times = Calibrated(self._times[alone] or self._times[not alone])
        return replace(
            self._without_times[alone], times=times, loss=self._loss(alone), per_transfer=self._engine(alone)
        )

    def _engine(self, alone: bool) -> Times:
        """The engine's time for a redistribution, where that is not in the times of those that were measured."""
        moved = any(one.op == "redistribute" for one in self._times[alone])
        return Times() if moved else Times(self.per_transfer, self.per_transfer)

    def _loss(self, alone: bool) -> HostCost:
        workload = (self._workload.alone if alone else None) or self._workload
        measured = mean(self._around[alone]).numbers if self._around[alone] else None
        noted = self._ranks.first(lambda: measured or self._noted(alone, _around_of(workload, alone)))
        return HostCost(per_pass=sum(noted[:2]), host=sum(noted[2:])) if noted else HostCost()

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
            links=self.links,
            update=first,
            batch_norm=workload.batch_norm,
            microbatch=workload.microbatch,
            on_cpu=workload.device.type == "cpu",
            recorded=workload.recorded,
            per_transfer=self._engine(False),
        )
        return {True: alone, False: with_overhead(replace(alone, update=slowest), workload, ranks)}


def device_of(workload: Workload, neighbours: int) -> Device:
    """The device here as the store names it, where so many ranks of the host compute at once."""
    weights = next((value.dtype for value in workload.graph.parameters()), torch.float32)
    precision = str(workload.precision or weights).removeprefix("torch.")
    device = this_device(workload.device)
    return replace(device, precision=precision, channels_last=workload.channels_last, neighbours=neighbours)


def _around_of(workload: Workload, alone: bool) -> str:
    return f"around {workload.name} {workload.samples} {'alone' if alone else 'together'}"
