"""The planner's one entry: from a question, which has a workload and a number of devices, to the plans that are
predicted to be fastest."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import torch

from convoy.comm.ranks import Ranks
from convoy.engine.allocation import release_freed_memory
from convoy.errors import ConvoyError, TooLargeError
from convoy.launch.host import HostWatch, beside_others
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs, HostCost
from convoy.planner.cost.link import Links
from convoy.planner.cost.prediction import Scored, most, nothing_fits, predicted, rank_memory
from convoy.planner.cost.step import Staging
from convoy.planner.measured import (
    ASSUMED_LINKS,
    LONGEST,
    Job,
    Measurements,
    Progress,
    check_optimizer,
    device_of,
    jobs_for,
    plan_job,
)
from convoy.planner.search.layers import Constraints, Layers
from convoy.planner.search.prices import meshes as meshes_of
from convoy.planner.search.search import SearchResult, search
from convoy.planner.search.stages import in_best_passes, search_stages
from convoy.planner.store import ProfileStore, device_memory, remember, unlike_runs
from convoy.planner.workload import Workload, memory_of_updates
from convoy.plans.mesh import STAGE, Mesh
from convoy.plans.place import sample_axes
from convoy.plans.plan import Plan
from convoy.units import shorten, size

# Seconds, and updates of one device, that a plan may take; the larger counts
_PATIENCE_S, _PATIENCE_UPDATES = 120.0, 30
_MEASURING = 0.6  # the part of that after which nothing more is profiled
# About: seconds for links, optimizer and engine; passes of a profiling; updates of a racer
_FIXED_S, _PASSES, _RACE_UPDATES = 8.0, 5, 5
# The part of a rank's memory that the tensors of a racer may take: the network that is copied comes on top
_RACE_ROOM = {"cpu": 1.0, "cuda": 0.6}
# Of the plans that are predicted to be fastest, beside plain `sample`, however clear the prediction is: the case that a
# race is for, times that were measured beside other work, predicted a factor of two
_RACERS = 2
_SETTLED = 0.02  # the part of a plan's computing time that need not be measured
_BUSY = 2.0  # times that differ so much between prediction and race, in the median, were taken on a busy machine


@dataclass(frozen=True)
class Question:
    """What `convoy plan`, `--plan auto`, `convoy.plan` and the forecasts of `convoy bench` ask the planner."""

    workload: Workload
    devices: int
    # as `links_named` reads it; by default measured where as many ranks run, and assumed elsewhere
    link: str | Links | None = None
    store: ProfileStore | None = None
    fixes: Sequence[str] = ()
    # bytes of a device; by default a search knows what is free here, if the plan is for the ranks that are
    memory_limit: float | None = None
    plans: Sequence[Plan] = ()  # that are predicted instead of a search
    rivals: Sequence[Plan] = ()  # predicted beside what a search finds, as far as they fit, and in the race
    input: HostCost | None = None
    notes: Sequence[str] = ()  # to begin with


@dataclass(frozen=True)
class Planned:
    """The answer of the planner."""

    workload: Workload  # the training; with stages, in other passes (`Workload.through`)
    devices: int
    candidates: tuple[Scored, ...]  # the fastest plans, the best first; plain `sample` among them if it can be
    serial: Scored  # one device
    search: SearchResult | None  # on the rank that searched; None where plans were only scored
    costs: Costs  # with which the candidates were predicted
    notes: tuple[str, ...] = field(default=())  # sentences about what was assumed
    measured: Mapping[Plan, float] = field(default_factory=dict)  # seconds of an update, of the plans that raced

    @property
    def best(self) -> Scored:
        return self.candidates[0]

    @property
    def speedup(self) -> float:
        return self.speedup_of(self.best)

    def speedup_of(self, plan: Scored) -> float:
        return self.serial.seconds / plan.seconds if plan.seconds else 1.0

    def warning(self, seconds: float) -> str:
        """What to say first of a plan whose update takes so long, where one device is predicted to take less."""
        ratio = self.serial.seconds / seconds if seconds else 1.0
        return f"one device is faster: {ratio:.2f} ×" if self.devices > 1 and ratio < 1 else ""

    def shares(self, plan: Plan) -> tuple[int, ...] | None:
        """Microbatches of each part of the batch under a plan; None where they are as even as can be."""
        shares, workload = self.workload.shares, self.workload
        axes = sample_axes(((call.layer, call.op) for call in workload.graph.calls), plan)
        return shares if shares is not None and plan.mesh.size(axes) == len(shares) else None


# Measures some updates under a plan; all ranks call it, and get the seconds of one on the slowest of them
Race = Callable[[Planned, Scored, Ranks], float]
Proposal = tuple[Plan, int | None]  # A plan, and the number of passes through its stages; None where it has none


def score(
    workload: Workload, plan: Plan, costs: Costs, passes: int | None = None, memory_limit: float | None = None
) -> Scored:
    """The prediction for a plan; a ConvoyError where a layer cannot be divided, or the network not cut, as it says.
    Without a number of passes, stages take the fastest one. Within `memory_limit`, the bytes of a rank, they take the
    fastest passes and the faster of the schedules that fit."""

    def price(result: Scored) -> tuple[bool, float]:
        fits = memory_limit is None or result.memory.total <= memory_limit
        return not fits, result.seconds if fits else result.memory.total

    def in_passes(number: int | None) -> Scored:
        update = workload.through(plan.num_stages, number, plan.parts)
        placement = update.place(plan)
        staging = Staging.of(plan, update.graph, update.outputs, update.samples_of_passes)
        if staging is None:
            return predicted(plan, placement, costs, update.passes)
        ordered = (replace(staging, schedule=schedule) for schedule in workload.schedules)
        return min((predicted(plan, placement, costs, update.passes, order) for order in ordered), key=price)

    if passes is not None or plan.num_stages == 1 or not workload.counts:
        return in_passes(passes)
    best = in_best_passes(workload.counts_for(plan.parts), plan.num_stages, in_passes, price)
    assert best is not None
    return best


def make_plan(
    question: Question, ranks: Ranks, progress: Progress = lambda what, done, total: None, race: Race | None = None
) -> Planned:
    """Find the fastest plan; all ranks call it, and get the same answer.

    In order: measure the links and the layers, or look them up (`measured.py`); search (`search/`), or take the
    requested plans; predict each of them by its timeline (`cost/step.py`). Operations that were not measured are
    predicted from those that were (`cost/calibrated.py`), so the best plan is profiled and searched for again, until no
    more than 2 % of its computing time is predicted so, or six tenths of the time for a plan are over: of the longer of
    two minutes and 30 updates of one device. In the rest the best plans make a few updates each; without a `race` the
    prediction alone decides. `explanation.py` explains the answer.

    `progress` is told the seconds that have passed, of about how many. A TooLargeError where no plan fits into memory,
    a ConvoyError for a fix that cannot be, or a plan for another number of devices.
    """
    return _Planning(question, ranks, progress).answer(race)


class _Planning:
    """The making of one answer. All ranks do the same; rank 0 searches, and tells the others of the plans."""

    def __init__(self, question: Question, ranks: Ranks, progress: Progress) -> None:
        self.question, self.ranks, self.workload = question, ranks, question.workload
        devices, plans = question.devices, question.plans
        for plan in plans:
            if plan.mesh.num_devices != devices:
                raise ConvoyError(
                    f"the plan {plan} is for {plan.mesh.num_devices} devices, but {devices} are asked for"
                )
        check_optimizer(self.workload.optimizer)
        Layers(self.workload.graph, self.constraints())  # a fix that cannot be is told before anything is measured
        release_freed_memory(self.workload.device)  # of what was planned or trained before, in blocks of other sizes
        room = min(self._free(), math.inf if question.memory_limit is None else question.memory_limit)
        self.limit = room if devices == ranks.num > 1 and not plans else question.memory_limit
        self.measured = Measurements(self.workload, ranks, question.store, progress, room)
        self.results: list[SearchResult] = []  # of rank 0

    def constraints(self, memory_limit: float | None = None) -> Constraints:
        """Of a search, as the question says them."""
        return Constraints(tuple(self.question.fixes), memory_limit)

    def _free(self) -> float:
        """Bytes of the device that has least."""
        return min(self.ranks.gather(device_memory(self.workload.device, self.ranks.on_host)[0]))

    def answer(self, race: Race | None) -> Planned:
        question, ranks, measured = self.question, self.ranks, self.measured
        devices, store, together = question.devices, question.store, question.devices == ranks.num > 1
        meshes = list(dict.fromkeys(plan.mesh for plan in question.plans)) or meshes_of(devices)
        jobs = jobs_for(self.workload, meshes, question.plans)
        self._estimate(jobs, race)
        if self.limit is not None and not question.plans and devices > 1:
            measured.say("looking for plans that fit into memory")
            ranks.first(self._check_memory)
        measured.find_links(question.link, devices, meshes)
        measured.give_back_memory()  # of the search, and of the largest messages
        measured.room = min(measured.room, self._free())
        serial = self._measure(jobs)
        slowdowns = measured.slowdowns()
        slowdowns = slowdowns if len(slowdowns) == devices else ()
        if self.workload.by_speed is not None and devices > 1:
            self.workload = self.workload.by_speed(slowdowns)
        candidates, costs, left_out = self._candidates(slowdowns)
        speeds = [_on_speeds(slowdowns, self.workload.shares)] if slowdowns else []
        notes = (*question.notes, *measured.notes, *speeds, *left_out)
        planned = Planned(self.workload, devices, candidates, serial, next(iter(self.results), None), costs, notes)
        device, optimizer = device_of(self.workload, ranks.on_host), self.workload.optimizer_name
        if store is not None and ranks.rank == 0 and optimizer and together and question.link is None:
            remember(store, device, devices, optimizer, costs)
        if race is not None and together:
            watch, in_time = HostWatch(), partial(measured.has_time, 1.0)
            planned = _raced(planned, question.rivals, ranks, race, measured, in_time)
            measured.loads += ranks.gather(watch.read())
        doubts = list(beside_others(measured.loads))
        if store is not None:
            expected = {plan.plan: plan.seconds for plan in planned.candidates} | dict(planned.measured)
            name, batch = self.workload.name, self.workload.batch
            doubts += ranks.first(lambda: list(unlike_runs(store, device, name, batch, expected)))
        measured.end()
        return replace(planned, notes=(*planned.notes, *doubts))

    def _estimate(self, jobs: Sequence[Job], race: Race | None) -> None:
        """How long planning will take, about."""
        measured, devices = self.measured, self.question.devices
        alone_s = (self.workload.alone or self.workload).passes * measured.expected_s(jobs[0])
        racing_s = 0.0 if race is None or devices == 1 else (_RACERS + 1) * _RACE_UPDATES * alone_s / devices
        jobs = [*jobs[:2], *filter(measured.lacking, jobs[2:])]  # the first two are measured afresh
        profiling_s = sum(_PASSES * measured.expected_s(job) for job in jobs)
        measured.limit_s = _limit_s(alone_s)
        measured.total_s = self.ranks.broadcast(min(_FIXED_S + profiling_s + racing_s, measured.limit_s))

    def _measure(self, jobs: Sequence[Job]) -> Scored:
        """Profile what a search needs, or the requested plans; the prediction for one device."""
        question, measured = self.question, self.measured
        needed = len(jobs) if question.plans else 2  # one device, and the first strategy that can be: `sample`
        measured.profile(jobs[:needed], afresh=not question.plans and question.devices > 1)
        workload, alone = self.workload.alone or self.workload, measured.costs(alone=True)
        serial = score(workload, Plan(Mesh((), ())), replace(alone, input=question.input or alone.input))
        measured.limit_s = _limit_s(serial.seconds)
        for job in jobs[needed:]:
            if measured.has_time(_MEASURING):
                measured.profile([job])
        return serial

    def _candidates(self, slowdowns: tuple[float, ...]) -> tuple[tuple[Scored, ...], Costs, list[str]]:
        """The plans, best first and profiled until it is settled, with the costs by which they were predicted, and
        notes on those that do not fit."""
        question, ranks, measured, workload = self.question, self.ranks, self.measured, self.workload
        devices, plans = question.devices, question.plans
        uneven = len(set(workload.shares or ())) > 1  # what ranks compute has then sizes, and so times, of their own
        # given plans run in the passes and the schedule of `convoy train --plan`: the best ones would promise a speed
        # that no command gives
        as_run = replace(workload, schedules=(workload.default_schedule,)) if plans else workload
        profiled: list[Proposal] = []
        while True:
            costs = measured.costs(alone=devices == 1)
            costs = replace(costs, input=question.input or costs.input, slowdowns=slowdowns)
            if not plans:
                measured.say("searching")
            proposals = ranks.first(partial(self._proposals, costs))
            scores = [score(as_run, plan, costs, passes, self.limit) for plan, passes in proposals]
            scores, left_out = _fitting(scores, costs, self.limit)
            scores.sort(key=lambda result: result.seconds)
            best = ranks.broadcast((scores[0].plan, scores[0].passes))
            of_interest = [pair for pair in proposals if pair[0].num_stages > 1] if plans else [best]
            pairs = [pair for pair in of_interest if pair not in profiled]
            pairs = ranks.broadcast([pair for pair in pairs if measured.lacking(plan_job(workload, *pair)) > _SETTLED])
            pairs = [pair for pair in pairs if pair[0].num_stages > 1 or not uneven]
            if devices == 1 or not pairs or not measured.has_time(_MEASURING):
                break
            profiled += pairs
            measured.profile([plan_job(workload, *pair) for pair in pairs])
        scores.sort(key=lambda result: result.plan != best[0])  # rank 0's best comes first on every rank
        measured.give_back_memory()
        return tuple(scores), costs, left_out

    def _proposals(self, costs: Costs) -> list[Proposal]:
        """The requested plans, or those that a search finds, and the rivals."""
        workload, question = self.workload, self.question
        if question.plans:
            return [(plan, passes_of(workload, plan)) for plan in question.plans]
        proposals = propose(workload, question.devices, costs, self.constraints(self.limit), self.results)
        plans = [plan for plan, _ in proposals]
        for plan in question.rivals:
            with contextlib.suppress(ConvoyError):  # which the network cannot have
                workload.through(plan.num_stages, None, plan.parts).place(plan)
                proposals += [(plan, passes_of(workload, plan))] if plan not in plans else []
        return proposals

    def _check_memory(self) -> None:
        """Refuse devices into which no plan fits, with a TooLargeError, before anything is measured: for that no times
        are needed."""
        workload, devices, limit = self.workload, self.question.devices, self.limit
        update, on_cpu = memory_of_updates(workload.optimizer), workload.device.type == "cpu"
        costs = Costs(Calibrated({}), ASSUMED_LINKS, update, batch_norm=workload.batch_norm, on_cpu=on_cpu)
        with contextlib.suppress(ConvoyError):  # a batch that so many ranks cannot share
            _fitting([score(workload, Plan.by_samples(devices), costs)], costs, limit)
            return
        proposed = propose(workload, devices, costs, self.constraints(limit), [])
        _fitting([score(workload, plan, costs, passes, limit) for plan, passes in proposed], costs, limit)


def _limit_s(update_s: float) -> float:
    """Seconds that a plan may take, by those of an update of one device."""
    return max(_PATIENCE_S, _PATIENCE_UPDATES * update_s)


def _raced(
    planned: Planned,
    rivals: Sequence[Plan],
    ranks: Ranks,
    race: Race,
    measured: Measurements,
    is_in_time: Callable[[float], bool],
) -> Planned:
    """The plan that is measured to be fastest comes first: of those that are predicted to be so, of plain `sample`, of
    the rivals, and of any that is predicted to be faster than the one which wins. All ranks call it; a ConvoyError
    where none can be run."""
    # One device is none of them: no plan of several ranks is that, and its prediction is its own profile, made afresh.
    times, notes, failure = dict[Plan, float](), list(planned.notes), None
    longest_s, device, wanted = 0.0, planned.workload.device, {Plan.by_samples(planned.devices), *rivals}
    gpus, room = [device] if device.type == "cuda" else [], _RACE_ROOM[device.type] * measured.room
    wanted |= {racer.plan for racer in planned.candidates[:_RACERS]}
    fit = [racer for racer in planned.candidates if racer.memory.total <= room]
    for racer in planned.candidates:
        if racer.plan in wanted and racer not in fit:
            needs = size(racer.memory.total)
            notes.append(f"{racer.plan} did not race: {needs} on each device leave too little memory")
    racers = [racer for racer in fit if racer.plan in wanted]
    while racers:
        plan = ranks.broadcast(racers[0].plan)
        if len(times) > 1 and not is_in_time(longest_s):
            notes.append(f"{plan} did not race: there was no more time")
            break
        began, racer = time.monotonic(), next(racer for racer in fit if racer.plan == plan)
        measured.say(f"racing {plan}")
        measured.give_back_memory()  # of the one before it
        try:
            with measured.attempt(plan_job(planned.workload, plan, racer.passes)), torch.random.fork_rng(devices=gpus):
                times[plan] = ranks.trying(f"racing {plan}", partial(race, planned, racer))
        except ConvoyError as error:
            failure = error
            notes.append(f"{plan} left the race: {error}")
            times[plan] = math.inf
        longest_s = max(longest_s, time.monotonic() - began)
        best = min(fit, key=lambda racer: times.get(racer.plan, math.inf))
        waiting = [racer for racer in fit if racer.plan not in times]
        racers = [racer for racer in waiting if racer.plan in wanted]
        racers = racers or [racer for racer in waiting if racer.seconds < best.seconds]
    times = {plan: seconds for plan, seconds in times.items() if seconds < math.inf}
    if not times and failure is not None:
        raise TooLargeError(str(failure)) if getattr(failure, "out_of_memory", False) else failure
    ratio = median([times[racer.plan] / racer.seconds for racer in fit if racer.plan in times] or [1.0])
    if not 1 / _BUSY <= ratio <= _BUSY:
        notes.append(
            f"in the race updates took {ratio:.2g} times as long as predicted, so the order of these plans is not to "
            "be relied on: the machine was probably busy while times were measured; plan again when it is idle "
            "(convoy profile --clear forgets what was measured)"
        )
    order = sorted(planned.candidates, key=lambda plan: (plan.plan not in times, times.get(plan.plan, plan.seconds)))
    return replace(planned, candidates=tuple(order), notes=tuple(notes), measured=times)


def passes_of(workload: Workload, plan: Plan) -> int | None:
    """The passes in which the trainer runs a requested plan with stages; None for a plan without."""
    return workload.through(plan.num_stages, None, plan.parts).passes if plan.num_stages > 1 else None


def _on_speeds(slowdowns: Sequence[float], shares: tuple[int, ...] | None) -> str:
    ratios = " : ".join(f"{slowdown / min(slowdowns):.2f}" for slowdown in slowdowns)
    sentence = f"the devices are not equally fast: the same takes them {ratios}"
    if shares is None or len(set(shares)) == 1:
        return f"{sentence}, and the slowest decides"
    where = "over all of them" if len(shares) == len(slowdowns) else f"into {len(shares)} parts"
    return f"{sentence}; plans that divide samples {where} do so as --shares {','.join(map(str, shares))}"


def _fitting(scores: Sequence[Scored], costs: Costs, limit: float | None) -> tuple[list[Scored], list[str]]:
    """The plans that fit into memory, and a note on each of the others; a TooLargeError where none fits."""
    too_large = [plan for plan in scores if limit is not None and plan.memory.total > limit]
    errors = []
    for plan in sorted(too_large, key=lambda plan: plan.memory.total):
        what = f"the plan {shorten(str(plan.plan), LONGEST)} does not fit: it"
        errors.append(nothing_fits(plan.placement, costs, plan.memory.total, limit or 0.0, what, plan.staging))
    if len(too_large) == len(scores):
        raise errors[0]
    return [plan for plan in scores if plan not in too_large], [str(error) for error in errors]


def propose(
    workload: Workload, devices: int, costs: Costs, constraints: Constraints, results: list[SearchResult]
) -> list[Proposal]:
    """The plans that the searches find, and in `results` all that is said of those without stages; a ConvoyError where
    there is none, or none fits into memory."""
    memory_limit = constraints.memory_limit
    plans: list[Plan] = []
    refused: ConvoyError | None = None
    try:
        result = search(workload, devices, costs, constraints)
        results[:] = [result]
        plans += [candidate.plan for candidate in result.candidates]
    except ConvoyError as error:
        refused = error
    known = result.best.seconds if plans else math.inf
    staged = search_stages(workload, devices, costs, constraints, known=known)
    cut = [(plan.plan, plan.passes) for plan in staged]
    if refused is not None and not cut:
        raise _smallest(workload, devices, costs, memory_limit, refused) if memory_limit is not None else refused
    plain = Plan.by_samples(devices)
    if plain not in plans and Layers(workload.graph, constraints).fixes_hold(plain):
        with contextlib.suppress(ConvoyError):  # a batch that so many ranks cannot share
            placement = workload.place(plain)
            if memory_limit is None or most(rank_memory(placement, costs)).total <= memory_limit:
                plans.append(plain)
    return [*((plan, None) for plan in plans), *cut]


def _smallest(workload: Workload, devices: int, costs: Costs, limit: float, refused: ConvoyError) -> ConvoyError:
    """Why nothing fits: what plans without stages say, or one with as many stages as devices, which need less."""
    if not isinstance(refused, TooLargeError) or not workload.counts or devices == 1:
        return refused
    try:
        result = score(workload, Plan(Mesh((STAGE,), (devices,))), costs, memory_limit=limit)
    except ConvoyError:  # fewer layers than devices
        return refused
    passes = f"{result.passes} pass{'es' * (result.passes > 1)}"
    what = f"no plan fits: {result.plan} in {passes}, of equal work, still"
    error = nothing_fits(result.placement, costs, result.memory.total, limit, what, result.staging)
    return error if result.memory.total < refused.needed else refused
