"""The planner's one entry: from a workload and a number of devices to the plans that are predicted to be fastest."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from convoy.comm.ranks import Ranks
from convoy.engine.allocation import release_freed_memory
from convoy.errors import ConvoyError, TooLargeError
from convoy.hardware.catalog import Hop
from convoy.launch.host import HostWatch, beside_others
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs, HostCost
from convoy.planner.cost.link import Links, links_named, ring
from convoy.planner.cost.pipeline import Staging
from convoy.planner.cost.prediction import Scored, most, rank_memory, scored
from convoy.planner.cost.store import ProfileStore, device_memory
from convoy.planner.link_probe import measured_links
from convoy.planner.measured import LONGEST, Measurements, Progress, check_optimizer, device_of, jobs_for, plan_job
from convoy.planner.remembered import remember, unlike_runs
from convoy.planner.search.layers import Constraints, Layers
from convoy.planner.search.memory import nothing_fits
from convoy.planner.search.prices import meshes as meshes_of
from convoy.planner.search.search import SearchResult, search
from convoy.planner.search.stages import in_best_passes, search_stages
from convoy.planner.workload import Workload, memory_of_updates
from convoy.plans.mesh import STAGE, Mesh
from convoy.plans.place import sample_axes
from convoy.plans.plan import Plan
from convoy.units import shorten, size

# Measures some updates under a plan; all ranks call it, and get the seconds of one on the slowest of them
Race = Callable[["Planned", Scored, Ranks], float]
# Seconds, and updates of one device, that a plan may take; the larger counts
_PATIENCE_S, _PATIENCE_UPDATES = 120.0, 30
_MEASURING = 0.6  # the part of that after which nothing more is profiled
# About: seconds for links, optimizer and engine; passes of a profiling; updates of a racer
_FIXED_S, _PASSES, _RACE_UPDATES = 8.0, 5, 5
# The part of a rank's memory that the tensors of a racer may take: the network that is copied comes on top
_RACE_ROOM = {"cpu": 1.0, "cuda": 0.6}
_RACERS = 2  # of the plans that are predicted to be fastest, beside plain `sample`
_SETTLED = 0.02  # the part of a plan's computing time that need not be measured

_ASSUMED_LINKS = Links(otherwise=lambda group: ring(Hop(2e-5, 5e9), len(group), overlap=False, cpu_share=1.0))


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
        return self.serial.seconds / self.best.seconds if self.best.seconds else 1.0

    def warning(self, seconds: float) -> str:
        """What to say first of a plan whose update takes so long, where one device is predicted to take less."""
        ratio = self.serial.seconds / seconds if seconds else 1.0
        return f"one device is faster: {ratio:.2f} ×" if self.devices > 1 and ratio < 1 else ""

    def shares(self, plan: Plan) -> tuple[int, ...] | None:
        """Microbatches of each part of the batch under a plan; None where they are as even as can be."""
        shares, workload = self.workload.shares, self.workload
        axes = sample_axes(((call.layer, call.op) for call in workload.graph.calls), plan)
        return shares if shares is not None and plan.mesh.size(axes) == len(shares) else None


Proposal = tuple[Plan, int | None]  # A plan, and the number of passes through its stages; None where it has none


def score(
    workload: Workload, plan: Plan, costs: Costs, passes: int | None = None, memory_limit: float | None = None
) -> Scored:
    """The prediction for a plan; a ConvoyError where a layer cannot be divided, or the network not cut, as it says.
    Without a number of passes, stages take the fastest one. Within `memory_limit`, the bytes of a rank, they take the
    fastest passes and the faster of the schedules that fit."""

    def price(one: Scored) -> tuple[bool, float]:
        fits = memory_limit is None or one.memory.total <= memory_limit
        return not fits, one.seconds if fits else one.memory.total

    def in_passes(number: int | None) -> Scored:
        update = workload.through(plan.num_stages, number, plan.parts)
        placement = update.place(plan)
        staging = Staging.of(plan, update.graph, update.outputs, update.samples_of_passes)
        if staging is None:
            return scored(plan, placement, costs, update.passes)
        ordered = map(staging.scheduled, workload.schedules)
        return min((scored(plan, placement, costs, update.passes, one) for one in ordered), key=price)

    if passes is not None or plan.num_stages == 1 or workload.in_passes is None or not workload.counts:
        return in_passes(passes)
    best = in_best_passes(workload.counts_for(plan.parts), plan.num_stages, in_passes, price)
    assert best is not None
    return best


def make_plan(
    workload: Workload,
    devices: int,
    ranks: Ranks,
    *,
    link: str | Links | None = None,
    store: ProfileStore | None = None,
    fixes: Sequence[str] = (),
    memory_limit: float | None = None,
    plans: Sequence[Plan] = (),
    rivals: Sequence[Plan] = (),
    input: HostCost | None = None,
    notes: Sequence[str] = (),
    progress: Progress = lambda what, done, total: None,
    race: Race | None = None,
) -> Planned:
    """Find the fastest plan; all ranks call it, and get the same answer.

    `convoy plan`, `--plan auto`, `convoy.plan` and the forecasts of `convoy bench` all ask here. In order: measure the
    links and the layers, or look them up (`measured.py`); search (`search/`), or take the requested `plans`; predict
    each of them by its timeline (`cost/step.py`). Operations that were not measured are predicted from those that were
    (`cost/calibrated.py`), so the best plan is profiled and searched for again, until no more than 2 % of its computing
    time is predicted so, or six tenths of the time for a plan are over: of the longer of two minutes and 30 updates of
    one device. In the rest the best plans make a few updates each. `verdict.py` explains the answer.

    Without a `link` (as `links_named` reads it) the links are measured where as many ranks run, and assumed otherwise.
    `memory_limit` is in bytes of a device; by default a search knows what is free here, if the plan is for the ranks
    that are. `rivals` are predicted beside what a search finds, as far as they fit, and race. `progress` is told the
    seconds that have passed, of about how many; without a `race` the prediction alone decides. A TooLargeError where no
    plan fits into memory, a ConvoyError for a fix that cannot be, or a plan for another number of devices.
    """
    meshes = list(dict.fromkeys(plan.mesh for plan in plans)) if plans else meshes_of(devices)
    for plan in plans:
        if plan.mesh.num_devices != devices:
            raise ConvoyError(f"the plan {plan} is for {plan.mesh.num_devices} devices, but {devices} are asked for")
    check_optimizer(workload.optimizer)
    Layers(workload.graph, Constraints(tuple(fixes)))  # a fix that cannot be is told before anything is measured
    release_freed_memory(workload.device)  # of what was planned or trained before, whose blocks are of other sizes
    room = min(ranks.gather(device_memory(workload.device, ranks.on_host)[0]))
    room = room if memory_limit is None else min(room, memory_limit)
    if devices == ranks.num > 1 and not plans:
        memory_limit = room
    say = _Course(progress)
    measured = Measurements(workload, ranks, store, say, room)
    jobs = jobs_for(workload, meshes, plans)
    alone_s = (workload.alone or workload).passes * measured.expected_s(jobs[0])
    racing_s = 0.0 if race is None or devices == 1 else (_RACERS + 1) * _RACE_UPDATES * alone_s / devices
    profiling_s = sum(_PASSES * measured.expected_s(job) for job in measured.unknown(jobs))
    say.total_s = ranks.broadcast(min(_FIXED_S + profiling_s + racing_s, _limit_s(alone_s)))
    if memory_limit is not None and not plans and devices > 1:
        say("looking for plans that fit into memory")
        ranks.first(partial(_check_memory, workload, devices, fixes, memory_limit))
    found_notes = list(notes)
    if isinstance(link, str):
        measured.links, note = links_named(link, workload.device.type == "cpu")
        found_notes.append(note)
    elif link is not None:
        measured.links = link
    elif devices > 1 and ranks.num == devices:
        say("measuring the links")
        measured.links, measured.per_transfer = ranks.trying(
            "measuring the links", lambda _: measured_links(meshes, workload.largest, workload.device)
        )
    elif devices > 1:
        measured.links = _ASSUMED_LINKS
        found_notes.append(
            f"the links between {devices} devices were not measured, as {ranks.num} run here: 5 GB/s are assumed"
        )
    measured.give_back_memory()  # of the search, and of the largest messages
    measured.room = min(room, *ranks.gather(device_memory(workload.device, ranks.on_host)[0]))
    needed = len(jobs) if plans else 2  # one device, and the first strategy that can be: `sample`
    measured.profile(jobs[:needed], afresh=not plans and devices > 1)
    alone = measured.costs(alone=True)
    serial = score(workload.alone or workload, Plan(Mesh((), ())), replace(alone, input=input or alone.input))
    limit_s = _limit_s(serial.seconds)

    def is_in_time(part: float = _MEASURING, needed_s: float = 0.0) -> bool:
        return ranks.first(lambda: say.passed_s + (needed_s or measured.longest_s) <= part * limit_s)

    for job in jobs[needed:]:
        if is_in_time():
            measured.profile([job])
    slowdowns = measured.slowdowns()
    slowdowns = slowdowns if len(slowdowns) == devices else ()
    workload = workload.by_speed(slowdowns) if workload.by_speed is not None and devices > 1 else workload
    uneven = len(set(workload.shares or ())) > 1  # what ranks compute has then sizes, and so times, of their own
    results: list[SearchResult] = []  # of rank 0; the others hear of the plans
    proposed: list[Proposal] = []
    while True:
        costs = measured.costs(alone=devices == 1)
        costs = replace(costs, input=input or costs.input, slowdowns=slowdowns)
        if not plans:
            say("searching")
        if plans:
            candidates = ranks.first(partial(_given, workload, plans))
        else:
            candidates = ranks.first(
                partial(propose, workload, devices, costs, Constraints(tuple(fixes), memory_limit), results)
            )
            proposals = [plan for plan, _ in candidates]
            candidates += _given(workload, [plan for plan in rivals if plan not in proposals and _goes(workload, plan)])
        as_run = replace(workload, schedules=(workload.default_schedule,)) if plans else workload
        scores = [score(as_run, plan, costs, passes, memory_limit) for plan, passes in candidates]
        left_out: list[str] = []
        if memory_limit is not None:
            scores, left_out = _fitting(scores, costs, memory_limit)
        scores.sort(key=lambda one: one.seconds)
        best = ranks.broadcast((scores[0].plan, scores[0].passes))
        staged = [one for one in candidates if one[0].num_stages > 1] if plans else [best]
        new = [one for one in staged if one not in proposed]
        lacking = ranks.broadcast([one for one in new if measured.lacking(plan_job(workload, *one)) > _SETTLED])
        lacking = [one for one in lacking if one[0].num_stages > 1 or not uneven]
        if devices == 1 or not lacking or not is_in_time():
            break
        proposed += lacking
        measured.profile([plan_job(workload, *one) for one in lacking])
    scores.sort(key=lambda one: one.plan != best[0])  # rank 0's best comes first on every rank
    measured.give_back_memory()
    if measured.is_empty:
        found_notes.append("nothing could be profiled in the memory there is: times are those of a typical slow core")
    plain = Plan.by_samples(devices)
    if memory_limit is not None and not plans and not fixes and all(one.plan != plain for one in scores):
        with contextlib.suppress(ConvoyError):  # a batch that so many ranks cannot share
            needs = score(workload, plain, costs).memory.total
            left_out.append(f"{plain} is left out: it needs {size(needs)} on a device, of {size(int(memory_limit))}")
    found_notes += [*measured.notes, *([_on_speeds(slowdowns, workload.shares)] if slowdowns else []), *left_out]
    if store is not None and ranks.rank == 0 and workload.optimizer_name and ranks.num == devices > 1:
        remember(store, device_of(workload, ranks.on_host), devices, workload.optimizer_name, costs)
    planned = Planned(workload, devices, tuple(scores), serial, next(iter(results), None), costs, tuple(found_notes))
    if race is not None and devices == ranks.num > 1:
        watch = HostWatch()
        planned = _raced(planned, rivals, ranks, race, measured, say, lambda needed_s: is_in_time(1.0, needed_s))
        measured.loads += ranks.gather(watch.read())
    planned = replace(planned, notes=(*planned.notes, *beside_others(measured.loads)))
    if store is not None:
        device = device_of(workload, ranks.on_host)
        expected = {one.plan: one.seconds for one in planned.candidates} | dict(planned.measured)
        doubts = ranks.first(lambda: list(unlike_runs(store, device, workload.name, workload.batch, expected)))
        planned = replace(planned, notes=(*planned.notes, *doubts))
    say.end()
    return planned


def _limit_s(update_s: float) -> float:
    """Seconds that a plan may take, by those of an update of one device."""
    return max(_PATIENCE_S, _PATIENCE_UPDATES * update_s)


class _Course:
    """Tells of the work in seconds that have passed, of a total that does not move."""

    def __init__(self, tell: Progress) -> None:
        self._tell, self._began = tell, time.monotonic()
        self.total_s = 1.0  # estimated beforehand

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._began

    def __call__(self, what: str) -> None:
        total = max(1, round(self.total_s))
        self._tell(f"planning, about {total} s: {what}", min(int(self.passed_s), total - 1), total)

    def end(self) -> None:
        total = max(1, round(self.total_s))
        self._tell("planning", total, total)


def _raced(
    planned: Planned,
    rivals: Sequence[Plan],
    ranks: Ranks,
    race: Race,
    measured: Measurements,
    say: Callable[[str], None],
    is_in_time: Callable[[float], bool],
) -> Planned:
    """The plan that is measured to be fastest comes first: of those that are predicted to be so, of plain `sample`, of
    the rivals, and of any that is predicted to be faster than the one which wins. All ranks call it; a ConvoyError
    where none can be run."""
    plain, took, notes = Plan.by_samples(planned.devices), dict[Plan, float](), list(planned.notes)
    failure: ConvoyError | None = None
    longest_s, device = 0.0, planned.workload.device
    gpus = [device] if device.type == "cuda" else []
    fitting = [one for one in planned.candidates if one.memory.total <= _RACE_ROOM[device.type] * measured.room]
    first = [one for place, one in enumerate(planned.candidates) if place < _RACERS or one.plan in (plain, *rivals)]
    for one in first:
        if one not in fitting:
            notes.append(f"{one.plan} did not race: {size(one.memory.total)} on each device leave too little memory")
    racers = [one for one in first if one in fitting]
    while racers:
        plan = ranks.broadcast(racers[0].plan)
        if len(took) > 1 and not is_in_time(longest_s):
            notes.append(f"{plan} did not race: there was no more time")
            break
        began, racer = time.monotonic(), next(one for one in fitting if one.plan == plan)
        say(f"racing {plan}")
        measured.give_back_memory()  # of the one before it
        try:
            with measured.attempt(plan_job(planned.workload, plan, racer.passes)), torch.random.fork_rng(devices=gpus):
                took[plan] = ranks.trying(f"racing {plan}", partial(race, planned, racer))
        except ConvoyError as error:
            failure = error
            notes.append(f"{plan} left the race: {error}")
            took[plan] = math.inf
        longest_s = max(longest_s, time.monotonic() - began)
        best = min(fitting, key=lambda one: took.get(one.plan, math.inf))
        waiting = [one for one in fitting if one.plan not in took]
        racers = [one for one in waiting if one in first] or [one for one in waiting if one.seconds < best.seconds]
    took = {plan: seconds for plan, seconds in took.items() if seconds < math.inf}
    if not took and failure is not None:
        raise TooLargeError(str(failure)) if getattr(failure, "out_of_memory", False) else failure
    ranking = sorted(planned.candidates, key=lambda one: (one.plan not in took, took.get(one.plan, one.seconds)))
    return replace(planned, candidates=tuple(ranking), notes=tuple(notes), measured=took)


def _given(workload: Workload, plans: Sequence[Plan]) -> list[Proposal]:
    return [(plan, passes_of(workload, plan)) for plan in plans]


def _goes(workload: Workload, plan: Plan) -> bool:
    with contextlib.suppress(ConvoyError):
        workload.through(plan.num_stages, None, plan.parts).place(plan)
        return True
    return False


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


def _fitting(scored: Sequence[Scored], costs: Costs, limit: float) -> tuple[list[Scored], list[str]]:
    """The plans that fit into memory, and a note on each of the others; a TooLargeError where none fits."""
    too_large = [one for one in scored if one.memory.total > limit]
    errors = []
    for one in sorted(too_large, key=lambda one: one.memory.total):
        what = f"the plan {shorten(str(one.plan), LONGEST)} does not fit: it"
        errors.append(nothing_fits(one.placement, costs, one.memory.total, limit, what, one.staging))
    if len(too_large) == len(scored):
        raise errors[0]
    return [one for one in scored if one not in too_large], [str(error) for error in errors]


def _check_memory(workload: Workload, devices: int, fixes: Sequence[str], limit: float) -> None:
    """Refuse devices into which no plan fits, with a TooLargeError, before anything is measured: for that no times are
    needed."""
    update, on_cpu = memory_of_updates(workload.optimizer), workload.device.type == "cpu"
    costs = Costs(Calibrated({}), _ASSUMED_LINKS, update, batch_norm=workload.batch_norm, on_cpu=on_cpu)
    with contextlib.suppress(ConvoyError):  # a batch that so many ranks cannot share
        if score(workload, Plan.by_samples(devices), costs).memory.total <= limit:
            return
    proposed = propose(workload, devices, costs, Constraints(tuple(fixes), limit), [])
    predictions = [score(workload, plan, costs, passes, limit) for plan, passes in proposed]
    _fitting(predictions, costs, limit)


def propose(
    workload: Workload,
    devices: int,
    costs: Costs,
    constraints: Constraints,
    results: list[SearchResult],
) -> list[Proposal]:
    """The plans that the searches find, and in `results` all that is said of those without stages; a ConvoyError where
    there is none, or none fits into memory. Stages are cut on all meshes and among all strategies."""
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
    cut = [(one.plan, one.passes) for one in staged]
    if refused is not None and not cut:
        raise _smallest(workload, devices, costs, memory_limit, refused) if memory_limit is not None else refused
    plain = Plan.by_samples(devices)
    if plain not in plans and not constraints.fixes:
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
        one = score(workload, Plan(Mesh((STAGE,), (devices,))), costs, memory_limit=limit)
    except ConvoyError:  # fewer layers than devices
        return refused
    passes = f"{one.passes} pass{'es' * (one.passes > 1)}"
    what = f"no plan fits: {one.plan} in {passes}, of equal work, still"
    other = nothing_fits(one.placement, costs, one.memory.total, limit, what)
    return other if one.memory.total < refused.needed else refused
