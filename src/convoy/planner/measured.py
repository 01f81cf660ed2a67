"""What the planner knows of the devices at hand: measured here, or looked up in the profile store.

The network is profiled as a whole, since a layer that is timed by itself, over and over, finds its data in the caches:
by samples, filters and channels, and under the plans that are given or that the search proposes. The optimizer is timed
on tensors of its own. Devices that take unequal times for equal work are found out here, too.
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
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch
from torch import nn

from convoy.comm.ranks import Ranks
from convoy.engine.allocation import release_freed_memory
from convoy.engine.watched import DeviceClock
from convoy.errors import ConvoyError, RankFailedError
from convoy.hardware.catalog import Hop
from convoy.launch.host import HostLoad, HostWatch
from convoy.ops import OPERATIONS
from convoy.ops.memory import predict_memory
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs, HostCost, Roofline, Times, Update, least_squares, mean
from convoy.planner.cost.link import Links, assumed, links_named
from convoy.planner.cost.local_op import VIEWS, LocalOp
from convoy.planner.profiling import ALIKE, Profiled, local_op_of, measured_links, profile, with_overhead
from convoy.planner.search.layers import compact
from convoy.planner.search.prices import Strategy, is_choosing
from convoy.planner.store import Device, ProfileStore, this_device
from convoy.planner.workload import MakeOptimizer, Workload, memory_of_updates
from convoy.plans.mesh import Mesh
from convoy.plans.place import Batch, Placement, Situation
from convoy.plans.plan import Plan, plan_text
from convoy.units import plural, shorten

# Of all layers that can have them, one after the other, in the profilings that a search begins with. With those of the
# plans that it then proposes they are enough: plans from every strategy on every mesh were no better, and mostly took
# longer, up to 2.7 times (docs/benchmarks/planner.md).
_PROFILED = ("sample", "filter", "channel")
# Tensors, and numbers in each: large ones do not fit into the caches, as in training
_POINTS = ((1, 2**24), (16, 2**20), (256, 2**16), (128, 64))
# The part of a rank's memory that the tensors of a pass may take: what kernels hold, and holes between blocks, have
# been up to 1.2 times that
_ROOM = 0.65
# Kept times that are so many times those of now, or the other way round, are of a machine in another state
_PACE = 1.25
_MATRIX, _REACHED = 512, 0.5  # rows of a matrix, and how much of the speed of its product layers reach, about
_ENOUGH_MORE = 1.2  # so many times as much memory is another try for what was killed
_FROM_OTHERS = "its layers are predicted from what else was profiled"
LONGEST = 60  # characters of a plan in what is said of a profiling
ASSUMED_LINKS = assumed(Hop(2e-5, 5e9), overlap=False, cpu_share=1.0)

Progress = Callable[[str, int, int], None]  # is told what is done, how much of it, and of how much


def plans_to_profile(workload: Workload, mesh: Mesh) -> Iterator[tuple[str, Plan]]:
    """Plans to profile on a mesh of one axis, each with a name; a layer that cannot have the strategy is by samples, or
    whole where that cannot be either."""

    def possible(layer: str, choice: str) -> Strategy:
        for strategy in (choice, "sample"):
            axes = (0,) if strategy == "sample" else ()
            with contextlib.suppress(ConvoyError):
                batch = Batch(mesh, axes, workload.parts(mesh.size(axes)) if axes else (range(workload.samples),))
                for call in calls:
                    if call.layer == layer:
                        OPERATIONS[call.op].place(Situation(workload.graph, mesh, batch, call, (strategy,), {}))
                return (strategy,)
        return ("replicate",)

    calls = [call for call in workload.graph.calls if is_choosing(call)]
    plans: list[dict[str, Strategy]] = []
    for strategy in _PROFILED:
        by_layer = {layer: possible(layer, strategy) for layer in dict.fromkeys(call.layer for call in calls)}
        if (strategy,) in by_layer.values() and by_layer not in plans:
            plans.append(by_layer)
            with contextlib.suppress(ConvoyError):
                workload.place(plan := compact(mesh, by_layer))
                yield strategy, plan


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
    measured, issued = [], list[float]()
    clock = DeviceClock(device)
    for tensors, numel in _POINTS:
        parameters = [nn.Parameter(torch.full((numel,), 0.5, device=device)) for _ in range(tensors)]
        optimizer = make(parameters)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()  # makes the state
        runs = [clock.spent(optimizer.step, in_a_row=1) for _ in range(repetitions)]
        measured.append((tensors * numel * 4, tensors, median(run.device for run in runs)))
        issued.append(median(run.host for run in runs))
    host, host_per_tensor = least_squares([(1.0, float(tensors)) for tensors, _ in _POINTS], issued)
    update = Update.fit(measured, state=memory_of_updates(make).state)
    return replace(update, host=host, host_per_tensor=host_per_tensor)


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
        if samples < 2 * self.plan.parts:  # a single sample may have no statistics
            return None
        microbatch = min(workload.microbatch, samples // self.plan.parts)  # so that each part has one
        smaller = replace(workload.resized(samples), shares=workload.shares, bound=workload.bound)
        return replace(self, workload=replace(smaller, microbatch=microbatch))


def jobs_for(workload: Workload, meshes: Sequence[Mesh], plans: Sequence[Plan] = ()) -> list[Job]:
    """What is profiled to begin with: one device by itself, and the requested plans, or every layer by samples, by
    filters and by channels over all devices, from which the search's costs of all else follow."""
    jobs = [Job("serial, one device", workload.alone or workload, Plan(Mesh((), ())), True)]
    jobs += [plan_job(workload, plan) for plan in plans if plan.mesh.num_devices > 1]
    if not plans and meshes and meshes[0].num_devices > 1:
        jobs += [Job(name, workload, plan) for name, plan in plans_to_profile(workload, meshes[0])]
    return jobs


def plan_job(workload: Workload, plan: Plan, passes: int | None = None) -> Job:
    """The profiling of a plan on all devices. With stages, each runs the whole network on one of their passes."""
    return Job(shorten(str(plan), LONGEST), workload.through(plan.num_stages, passes, plan.parts), plan)


@dataclass
class _Known:
    """What is known of a device, `alone` or while the other ranks of its host compute too."""

    device: Device
    kept: dict[LocalOp, Times]  # by the store
    new: dict[LocalOp, Times] = field(default_factory=dict)
    around: list[Times] = field(default_factory=list)

    @property
    def times(self) -> dict[LocalOp, Times]:
        return self.kept | self.new


class Measurements:
    """Times on the devices at hand, looked up or measured; every profiling adds to them. All ranks call it alike."""

    def __init__(
        self,
        workload: Workload,
        ranks: Ranks,
        store: ProfileStore | None = None,
        progress: Progress = lambda what, done, total: None,
        room: float = math.inf,
    ) -> None:
        self._workload, self._ranks, self._store, self._progress, self.room = workload, ranks, store, progress, room
        self._began, self.total_s, self.limit_s = time.monotonic(), 1.0, 0.0  # that planning will, and may, take
        self.links = Links()
        self._known: dict[bool, _Known] = {}  # by whether a device is alone
        for alone in (True, False):
            device = device_of(workload, 1 if alone else ranks.on_host)
            self._known[alone] = _Known(device, ranks.first(partial(store.times, device)) if store is not None else {})
        self._by_rank: list[tuple[float, ...]] = []
        self.notes: list[str] = []  # sentences on what could not be measured
        self.loads: list[HostLoad] = []  # of each profiling, by rank
        self.longest_s = 0.0  # of the longest profiling

    @property
    def _passed_s(self) -> float:
        return time.monotonic() - self._began

    def say(self, what: str) -> None:
        """Tell the progress of the work in seconds that have passed, of a total that does not move."""
        total = max(1, round(self.total_s))
        self._progress(f"planning, about {total} s: {what}", min(int(self._passed_s), total - 1), total)

    def end(self) -> None:
        self._progress("planning", max(1, round(self.total_s)), max(1, round(self.total_s)))

    def has_time(self, part: float, needed_s: float = 0.0) -> bool:
        """Whether another profiling, or work of so many seconds, ends within this part of the limit."""
        return self._ranks.first(lambda: self._passed_s + (needed_s or self.longest_s) <= part * self.limit_s)

    def find_links(self, link: str | Links | None, devices: int, meshes: Sequence[Mesh]) -> None:
        """Take the links that are given, as `links_named` reads them, or measure those of the meshes, where as many
        ranks run, or assume some."""
        device, note = self._workload.device, ""
        if isinstance(link, Links):
            self.links = link
        elif link is not None:
            self.links, note = links_named(link, device.type == "cpu")
        elif devices == self._ranks.num > 1:
            what = "measuring the links"
            self.say(what)
            self.links = self._ranks.trying(what, lambda _: measured_links(meshes, self._workload.largest, device))
        elif devices > 1:
            running = self._ranks.num
            note = f"the links between {devices} devices were not measured, as {running} run here: 5 GB/s are assumed"
            self.links = ASSUMED_LINKS
        if note:
            self._note(note)

    def profile(self, jobs: Sequence[Job], afresh: bool = False) -> None:
        """Profile the network in passes that fit into memory, but for what is known, or `afresh` all of it. A
        RankFailedError where a rank has failed otherwise than for want of memory."""
        for job in jobs:
            self.say(f"profiling {job.name}")
            fitting = self._fitting(job)
            if fitting is None:
                self._note(f"{job.name} was not profiled, for want of memory: {_FROM_OTHERS}")
                continue
            if fitting is not job:
                number = plural(fitting.workload.samples, "sample")
                self._note(f"{job.name} was profiled in passes of {number}, not {job.workload.samples}, for memory")
            times = self._known[job.alone].new if afresh else self._known[job.alone].times
            if not all(op in times for op in self._local_ops(fitting)):
                self._run(fitting, afresh)

    def _times(self, alone: bool) -> dict[LocalOp, Times]:
        """Those of one device alone, or of one beside others; where nothing is known, the other way round."""
        return self._known[alone].times or self._known[not alone].times

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    def give_back_memory(self) -> None:
        release_freed_memory(self._workload.device)

    def _fitting(self, job: Job) -> Job | None:
        """A job in passes that fit into memory, and at which no process was killed where there was as little; None
        where even the smallest do not."""
        fit: Job | None = job
        room = self.room * (self._ranks.on_host if job.alone and self._workload.device.type == "cpu" else 1)
        while fit is not None and (fit.memory > _ROOM * room or self.room <= self._ended(fit)):
            fit = fit.halved()
        return fit

    def _noted(self, alone: bool, name: str) -> Any:
        return self._store.noted(self._known[alone].device, name) if self._store is not None else None

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
        device = self._known[job.alone].device
        self._keep(lambda store: store.note(device, job.mark, self.room))
        try:
            yield
        finally:
            self._keep(lambda store: store.note(device, job.mark, None))

    def _run(self, job: Job, afresh: bool) -> None:
        known, start, watch = self._known[job.alone], time.monotonic(), HostWatch()
        together = not job.alone and job.placement.mesh.num_devices == self._ranks.num

        def passed(number: int) -> None:
            self.say(f"profiling {job.name}, pass {number}")

        def work(ranks: Ranks) -> Profiled:
            return profile(job.workload, job.placement, ranks, job.alone, self.links, together, passed=passed)

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
            self._compare(known, profiled.times)
        known.new = profiled.times | known.new  # of several the first counts: `sample`
        known.around.append(profiled.around)
        self._by_rank.append(profiled.by_rank)
        self.loads += loads
        if not any(load.is_disturbed for load in loads):
            around = _around_of(job.workload, job.alone)
            self._keep(lambda store: store.put(known.device, profiled.times))
            self._keep(lambda store: store.note(known.device, around, list(profiled.around.numbers)))

    def _compare(self, known: _Known, times_now: Mapping[LocalOp, Times]) -> None:
        """Bring kept times to the machine's pace of now, or forget them where it is another one."""
        both = [op for op in times_now if op in known.kept]
        before, now = (sum(times[op].total for op in both) for times in (known.kept, times_now))
        if not before or not now:
            return
        if max(before, now) <= _PACE * min(before, now):
            known.kept = {op: times * (now / before) for op, times in known.kept.items()}
            return
        known.kept = {}
        self._note(
            f"times that were kept of earlier plans and runs are {before / now:.2f} × those of now, so all is measured "
            "anew: convoy profile --clear forgets them"
        )
        self._keep(lambda store: store.clear(known.device))

    def _local_ops(self, job: Job) -> list[LocalOp]:
        placement = job.placement
        places = dict.fromkeys([0] if job.alone else self._ranks.places(placement.mesh))
        ops = (local_op_of(job.workload, placement, placed, place) for place in places for placed in placement.calls)
        return list(dict.fromkeys(op for op in ops if not op.is_empty and op.op not in VIEWS))

    def lacking(self, job: Job) -> float:
        """The part of a job's computing time that was not measured, as it is predicted; 0 where memory lacks for it."""
        measured, fitting = self._known[job.alone].times, self._fitting(job)
        times = Calibrated(measured)
        seconds = {op: times(op).total for op in self._local_ops(fitting)} if fitting is not None else {}
        return sum(of_op for op, of_op in seconds.items() if op not in measured) / (sum(seconds.values()) or 1.0)

    def expected_s(self, job: Job) -> float:
        """About the seconds that a pass will take, by what is known."""
        times = Calibrated(self._times(job.alone), self._roofline)
        return sum(times(op).total for op in self._local_ops(self._fitting(job) or job))

    @cached_property
    def _roofline(self) -> Roofline | None:
        """A rough roofline of the device, by one product of matrices; None where more is known."""
        if self._times(True):
            return None
        matrix = torch.full((_MATRIX, _MATRIX), 0.5, device=self._workload.device)
        clock = DeviceClock(self._workload.device)
        seconds = min(clock.spent(lambda: matrix @ matrix, in_a_row=1).device for _ in range(20))  # some undisturbed
        return Roofline(_REACHED * 2 * _MATRIX**3 / max(seconds, 1e-9), 1e10, 1e-5)

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
            self._keep(lambda store: store.note(self._known[False].device, name, seconds))
        seconds = self._ranks.first(lambda: seconds if rows else self._noted(False, name) or [])
        if len(seconds) < self._ranks.num or min(seconds) <= 0 or max(seconds) <= ALIKE * min(seconds):
            return ()
        return tuple(len(seconds) * of_rank / sum(seconds) for of_rank in seconds)

    def costs(self, alone: bool) -> Costs:
        """What is known by now of one device while the others of the host rest, or while all of them compute."""
        known, workload = self._known[alone], (self._workload.alone if alone else None) or self._workload
        around = mean(known.around).numbers if known.around else None
        noted = self._ranks.first(lambda: around or self._noted(alone, _around_of(workload, alone)))
        loss = HostCost(per_pass=sum(noted[:2]), host=sum(noted[2:])) if noted else HostCost()
        if not (times := self._times(alone)):
            self._note("nothing could be profiled in the memory there is: times are those of a typical slow core")
        return replace(self._without_times[alone], times=Calibrated(times), loss=loss)

    @cached_property
    def _without_times(self) -> dict[bool, Costs]:
        """Costs of the optimizer and the engine; these are measured once."""
        workload, ranks = self._workload, self._ranks
        self.give_back_memory()
        timed = partial(measure_update, workload.optimizer, workload.device)
        first = ranks.first(timed)
        updates = ranks.gather(ranks.trying("timing the optimizer", lambda _: timed())) if ranks.num > 1 else []
        slowest = max(updates, key=lambda update: update.per_byte, default=first)
        alone = Costs(
            times=Calibrated({}),
            links=self.links,
            update=first,
            batch_norm=workload.batch_norm,
            microbatch=workload.microbatch,
            on_cpu=workload.device.type == "cpu",
            recorded=workload.recorded,
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
