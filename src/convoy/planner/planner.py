"""The planner's one entry: from a workload and a number of devices to the plans that are predicted to be fastest."""

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from convoy.comm.groups import reusing
from convoy.comm.ranks import Ranks
from convoy.errors import ConvoyError, TooLargeError
from convoy.planner.cost.additive import Additive
from convoy.planner.cost.costs import Costs, HostCost
from convoy.planner.cost.device import device_memory
from convoy.planner.cost.link import Links, Rate, links_named
from convoy.planner.cost.memory import most, rank_memory
from convoy.planner.cost.pipeline import Staging
from convoy.planner.cost.prediction import Scored, scored
from convoy.planner.cost.store import ProfileStore
from convoy.planner.link_probe import measured_links
from convoy.planner.measured import Measurements, Progress, check_optimizer, device_of, jobs_for, plan_job
from convoy.planner.remembered import remember
from convoy.planner.search.cuts import InPasses
from convoy.planner.search.layers import Layers
from convoy.planner.search.memory import nothing_fits
from convoy.planner.search.meshes import SearchResult
from convoy.planner.search.prices import AXIS_STRATEGIES, redistributions
from convoy.planner.search.prices import meshes as meshes_of
from convoy.planner.search.search import TOLERANCE, search
from convoy.planner.search.stages import in_best_passes, search_stages
from convoy.planner.workload import Workload
from convoy.plans.mesh import STAGE, Mesh
from convoy.plans.place import Placement, sample_axes
from convoy.plans.plan import Plan

_PATIENCE_S, _PATIENCE_UPDATES = 60.0, 40
"""Seconds, and updates of one device, that a search may take; the larger counts."""
_SETTLED = 0.02
"""The part of a plan's computing time that need not be measured."""


@dataclass(frozen=True)
class Planned:
    """What the planner has found.

    Attributes:
        workload: the training that was planned; with stages, in other passes (`Workload.through`).
        devices: number of ranks.
        candidates: the fastest plans that were found, the best first, and plain `sample` among them if it can be.
        serial: one device.
        search: what the search says of its way, on the rank that searched; None where plans were only scored.
        costs: the costs with which the candidates were predicted.
        notes: sentences about what was assumed.
    """

    workload: Workload
    devices: int
    candidates: tuple[Scored, ...]
    serial: Scored
    search: SearchResult | None
    costs: Costs
    notes: tuple[str, ...] = field(default=())

    @property
    def best(self) -> Scored:
        """The plan to run."""
        return self.candidates[0]

    @property
    def speedup(self) -> float:
        """Of the best plan over one device."""
        return self.serial.seconds / self.best.seconds

    def warning(self, seconds: float) -> str:
        """What to say first of a plan whose update takes so long, where one device is predicted to take less."""
        ratio = self.serial.seconds / seconds if seconds else 1.0
        return f"one device is faster: {ratio:.2f} ×" if self.devices > 1 and ratio < 1 else ""

    def shares(self, plan: Plan) -> tuple[int, ...] | None:
        """Microbatches of each part of the batch under a plan; None where they are as even as can be."""
        shares, workload = self.workload.shares, self.workload
        axes = sample_axes(((call.layer, call.op) for call in workload.graph.calls), plan)
        return shares if shares is not None and plan.mesh.size(axes) == len(shares) else None


Proposal = tuple[Plan, int | None]
"""A plan, and the number of passes through its stages; None where it has none."""


def score(
    workload: Workload,
    plan: Plan,
    costs: Costs,
    passes: int | None = None,
    memory_limit: float | None = None,
) -> Scored:
    """The prediction for a plan.

    Args:
        workload: what is to be trained.
        plan: any plan for it.
        costs: of the devices.
        passes: through its stages; None for as many as are fastest.
        memory_limit: bytes that a rank has; stages take the fastest passes and the faster of the schedules that fit.

    Raises:
        ConvoyError: a layer cannot be divided as the plan says, or the network not cut.
    """

    def price(one: Scored) -> tuple[bool, float]:
        fits = memory_limit is None or one.memory.total <= memory_limit
        return not fits, one.seconds if fits else one.memory.total

    def in_passes(number: int | None) -> Scored:
        own = workload.through(plan.num_stages, number, plan.parts)
        placement = own.place(plan)
        staging = Staging.of(plan, own.graph, own.outputs, own.samples_of_passes)
        if staging is None:
            return scored(plan, placement, costs, own.passes)
        ordered = map(staging.scheduled, workload.schedules)
        return min((scored(plan, placement, costs, own.passes, one) for one in ordered), key=price)

    if passes is not None or plan.num_stages == 1 or workload.in_passes is None or not workload.counts:
        return in_passes(passes)
    found = in_best_passes(workload.counts_for(plan.parts), plan.num_stages, in_passes, price)
    assert found is not None
    return found


@reusing()
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
    input: HostCost | None = None,
    notes: Sequence[str] = (),
    progress: Progress = lambda what, done, total: None,
) -> Planned:
    """Find the fastest plan; all ranks call it, and get the same answer.

    `convoy plan`, `--plan auto`, `convoy.plan` and the forecasts of `convoy bench` all ask here. In order: measure the
    links and the layers, or look them up (`measured.py`); search (`search/`), or take the plans that are given;
    predict each of them by its timeline (`cost/step.py`). Operations that were not measured are predicted from those
    that were (`cost/calibrated.py`), so the best plan is profiled and searched for again, until no more than 2 % of its
    computing time is predicted so, or the longer of a minute and 40 updates of one device is over. `verdict.py`
    explains the answer.

    Args:
        workload: what is to be trained.
        devices: number of ranks that the plan is for.
        ranks: the devices at hand, on which times are measured.
        link: between the devices, as `links_named` reads it; None measures the links where as many ranks run, and
            assumes them otherwise.
        store: measurements from before; it keeps those of now.
        fixes: strategies that are given, such as `classifier.*=filter`.
        memory_limit: bytes that each device has; of `plans`, those that need more are left out.
        plans: are only predicted, instead of a search.
        input: getting the input of a pass ready, on each rank; None costs nothing.
        notes: sentences that come before those of the planner.
        progress: is told of long work.

    Raises:
        TooLargeError: no plan fits into memory.
        ConvoyError: a fix cannot be, or a plan is for another number of devices.
    """
    meshes = list(dict.fromkeys(plan.mesh for plan in plans)) if plans else meshes_of(devices)
    for plan in plans:
        if plan.mesh.num_devices != devices:
            raise ConvoyError(f"the plan {plan} is for {plan.mesh.num_devices} devices, but {devices} are asked for")
    start = time.monotonic()
    check_optimizer(workload.optimizer)
    Layers(workload.graph, fixes, ())  # a fix that cannot be is told before anything is measured
    found_notes = list(notes)
    links, per_transfer = Links(), 0.0
    if isinstance(link, str):
        links, note = links_named(link, workload.device.type == "cpu")
        found_notes.append(note)
    elif link is not None:
        links = link
    elif devices > 1 and ranks.num == devices:
        progress("measuring the links", 0, 1)
        links, per_transfer = ranks.trying(
            "measuring the links", lambda _: measured_links(meshes, workload.largest, workload.device)
        )
    elif devices > 1:
        links = Links(otherwise=lambda group: Rate(2e-5, 5e9).link(len(group), overlap=False, cpu_share=1.0))
        found_notes.append(
            f"the links between {devices} devices were not measured, as {ranks.num} run here: 5 GB/s are assumed"
        )
    room = min(ranks.gather(device_memory(workload.device, ranks.on_host)[0]))
    room = room if memory_limit is None else min(room, memory_limit)
    measured = Measurements(workload, ranks, links, store, progress, per_transfer, room)
    jobs = jobs_for(workload, meshes, plans)
    needed = len(jobs) if plans else 2  # one device, and the first strategy that can be: `sample`
    measured.profile(jobs[:needed])
    alone = measured.costs(alone=True)
    serial = score(workload.alone or workload, Plan(Mesh((), ())), replace(alone, input=input or alone.input))
    until = start + max(_PATIENCE_S, _PATIENCE_UPDATES * serial.seconds)

    def is_in_time() -> bool:
        return ranks.first(lambda: time.monotonic() + measured.longest_s <= until)

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
            progress("searching", 0, 1)
        if plans:
            candidates = ranks.first(partial(_given, workload, plans))
        else:
            candidates = ranks.first(partial(propose, workload, devices, costs, fixes, memory_limit, results))
        as_run = replace(workload, schedules=(workload.default_schedule,)) if plans else workload
        found = [score(as_run, plan, costs, passes, memory_limit) for plan, passes in candidates]
        left_out: list[str] = []
        if memory_limit is not None:
            found, left_out = _fitting(found, Additive(costs, workload.graph, workload.passes), memory_limit)
        found = ordered(found)
        best = ranks.broadcast((found[0].plan, found[0].passes))
        wanted = [one for one in candidates if one[0].num_stages > 1] if plans else [best]
        lacking = ranks.broadcast([one for one in wanted if one not in proposed and _lacks(measured, workload, one)])
        lacking = [one for one in lacking if one[0].num_stages > 1 or not uneven]
        if devices == 1 or not lacking or not is_in_time():
            break
        proposed += lacking
        measured.profile([plan_job(workload, *one) for one in lacking])
    found.sort(key=lambda one: one.plan != best[0])  # rank 0's best comes first on every rank
    measured.give_back_memory()
    progress("profiling", 1, 1)
    if measured.is_empty:
        found_notes.append("nothing could be profiled in the memory there is: times are those of a typical slow core")
    found_notes += [*measured.notes, *([_on_speeds(slowdowns, workload.shares)] if slowdowns else []), *left_out]
    if store is not None and ranks.rank == 0 and workload.optimizer_name and ranks.num == devices > 1:
        remember(store, device_of(workload, ranks.on_host), devices, workload.optimizer_name, costs)
    return Planned(workload, devices, tuple(found), serial, next(iter(results), None), costs, tuple(found_notes))


def _lacks(measured: Measurements, workload: Workload, proposal: Proposal) -> bool:
    return measured.lacking(plan_job(workload, *proposal)) > _SETTLED


def _given(workload: Workload, plans: Sequence[Plan]) -> list[Proposal]:
    """Plans that are given, in as many passes as they would run in."""
    return [(plan, passes_of(workload, plan)) for plan in plans]


def passes_of(workload: Workload, plan: Plan) -> int | None:
    """In how many passes the trainer runs a plan with stages that is given; None for a plan without."""
    return workload.through(plan.num_stages, None, plan.parts).passes if plan.num_stages > 1 else None


def _on_speeds(slowdowns: Sequence[float], shares: tuple[int, ...] | None) -> str:
    """A sentence on devices that are not equally fast."""
    least = min(slowdowns)
    said = (
        f"the devices are not equally fast: the same takes them {' : '.join(f'{own / least:.2f}' for own in slowdowns)}"
    )
    if shares is None or len(set(shares)) == 1:
        return f"{said}, and the slowest decides"
    where = "over all of them" if len(shares) == len(slowdowns) else f"into {len(shares)} parts"
    return f"{said}; plans that divide samples {where} do so as --shares {','.join(map(str, shares))}"


def _fitting(scored: Sequence[Scored], costs: Additive, limit: float) -> tuple[list[Scored], list[str]]:
    """Those that fit into memory, and a note on each of the others.

    Raises:
        TooLargeError: none fits.
    """
    too_large = [one for one in scored if one.memory.total > limit]
    errors = []
    for one in sorted(too_large, key=lambda one: one.memory.total):
        needs = partial(_needs, costs.costs, one.staging)
        what = f"the plan {one.plan} does not fit: it"
        errors.append(nothing_fits(one.placement, costs, one.memory.total, limit, what, needs))
    if len(too_large) == len(scored):
        raise errors[0]
    return [one for one in scored if one not in too_large], [str(error) for error in errors]


def _needs(costs: Costs, staging: Staging | None, placement: Placement) -> float:
    return most(rank_memory(placement, costs, staging)).total


def ordered(scored: Sequence[Scored]) -> list[Scored]:
    """By their time; but of those about as fast as the first, the one that redistributes least often comes first.

    The timeline sees more than the search, which has already chosen so: a plan that seems faster by less than the error
    of its prediction is more often luck than gain.
    """
    found = sorted(scored, key=lambda one: one.seconds)
    near = [one for one in found if one.seconds <= (1 + TOLERANCE) * found[0].seconds]
    best = min(near, key=_num_sent, default=None)
    return [one for one in found if one is best] + [one for one in found if one is not best]


def _num_sent(scored: Scored) -> int:
    """How many tensors are sent on their way through the network."""
    crossings = scored.staging.staged.crossings if scored.staging is not None else ()
    return len(redistributions(scored.placement)) + len(crossings)


def propose(
    workload: Workload,
    devices: int,
    costs: Costs,
    fixes: Sequence[str],
    memory_limit: float | None,
    results: list[SearchResult],
    on: Sequence[Mesh] | None = None,
    among: Sequence[str] = AXIS_STRATEGIES,
) -> list[Proposal]:
    """The plans that the searches find, and in `results` all that is said of those without stages.

    Args:
        workload, devices, costs, fixes, memory_limit: as in `make_plan`.
        results: takes what the search says.
        on, among: as in `search`; stages are cut on all meshes.

    Raises:
        ConvoyError: there is none, or none fits into memory.
    """
    plans: list[Plan] = []
    refused: ConvoyError | None = None
    try:
        found = search(
            workload.graph,
            devices,
            Additive(costs, workload.graph, workload.passes),
            parts=workload.parts,
            outputs=workload.outputs,
            fixes=fixes,
            memory_limit=memory_limit,
            on=on,
            among=among,
        )
        results[:] = [found]
        plans += [candidate.plan for candidate in found.candidates]
    except ConvoyError as error:
        refused = error
    cut = _search_stages(workload, devices, costs, fixes, memory_limit, found.best.seconds if plans else math.inf)
    if refused is not None and not cut:
        raise _smallest(workload, devices, costs, memory_limit, refused) if memory_limit is not None else refused
    plain = Plan.by_samples(devices)
    if plain not in plans and not fixes:
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
    other = nothing_fits(one.placement, Additive(costs, workload.graph, one.passes), one.memory.total, limit, what)
    return other if one.memory.total < refused.needed else refused


def _search_stages(
    workload: Workload,
    devices: int,
    costs: Costs,
    fixes: Sequence[str],
    memory_limit: float | None,
    known: float,
) -> list[Proposal]:
    """The fastest plans with stages, if they may be as fast as what is known."""
    if not workload.counts or devices == 1:
        return []

    def at(passes: int) -> InPasses:
        own = workload.through(devices, passes)
        equal = replace(costs, slowdowns=())
        return InPasses(own.graph, own.outputs, own.passes, own.parts, Additive(equal, own.graph, own.passes))

    found = search_stages(
        cache(at),
        workload.counts,
        devices,
        costs.links,
        slowdowns=costs.slowdowns,
        fixes=fixes,
        memory_limit=memory_limit,
        known=known,
        schedules=workload.schedules,
    )
    return [(one.plan, one.passes) for one in found]
