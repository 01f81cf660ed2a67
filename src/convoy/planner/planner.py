"""From a workload and devices to the plan that is predicted to be fastest.

What is known of the links between the devices that a plan is for.
"""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from convoy.comm.groups import Groups
from convoy.comm.ranks import Ranks
from convoy.errors import ConvoyError
from convoy.planner.cost.additive import Additive
from convoy.planner.cost.costs import Around, Costs
from convoy.planner.cost.link import Curve, Link, Links, Rate, first_group
from convoy.planner.cost.memory import RankMemory, most, rank_memory
from convoy.planner.cost.step import predict
from convoy.planner.cost.store import ProfileStore
from convoy.planner.cost.timeline import Timeline, apart
from convoy.planner.link_probe import SIZES, measure_links
from convoy.planner.measured import Knowledge, Progress, check_optimizer, jobs_for, measure
from convoy.planner.search.layers import Layers
from convoy.planner.search.memory import nothing_fits
from convoy.planner.search.prices import meshes, redistributions
from convoy.planner.search.search import TOLERANCE, search
from convoy.planner.search.ways import SearchResult
from convoy.planner.workload import Workload
from convoy.plans.mesh import Axes, Mesh
from convoy.plans.place import Placement, sample_axes
from convoy.plans.plan import Plan


def measured_links(meshes: Sequence[Mesh], largest: int, device: torch.device) -> tuple[Links, float]:
    """Measure the groups of all meshes on the ranks that have joined; all ranks call it.

    Args:
        meshes: whose groups exchange.
        largest: bytes of the largest tensor that will be sent; much larger ones are not tried.
        device: where the tensors are.

    Returns:
        The links, and the seconds that the engine takes for a redistribution in one direction, beside the collective.
    """
    sizes = [size for size in SIZES if size <= 4 * largest]
    found: dict[tuple[int, ...], Link] = {}
    overhead = 0.0
    for mesh in meshes:
        missing: dict[Axes, tuple[int, ...]] = {}
        for axes in _subsets(mesh):
            ranks = first_group(mesh, axes)
            if len(ranks) > 1 and ranks not in found and ranks not in missing.values():
                missing[axes] = ranks
        if not missing:
            continue
        for axes, times in measure_links(Groups(mesh), missing, device, sizes).items():
            overhead = max(overhead, times.overhead)
            found[missing[axes]] = Link(
                Curve.through(times.all_reduce),
                Curve.through(times.exchange),
                times.overlap,
                times.cpu_share,
                Curve.through(times.reduce_scatter),
                Curve.through(times.gather),
            )
    return Links(found), overhead


def _subsets(mesh: Mesh) -> list[Axes]:
    axes = tuple(mesh.axes)
    return [chosen for count in range(1, len(axes) + 1) for chosen in itertools.combinations(axes, count)]


@dataclass(frozen=True)
class Scored:
    """A plan and what is predicted of it.

    Attributes:
        placement: of the workload's graph.
        timeline: of one update.
        memory: of the rank that needs most.
    """

    plan: Plan
    placement: Placement
    timeline: Timeline
    memory: RankMemory

    @property
    def seconds(self) -> float:
        """Of an update."""
        return self.timeline.total


@dataclass(frozen=True)
class Planned:
    """What the planner has found.

    Attributes:
        workload: that was planned.
        devices: number of ranks.
        candidates: the fastest plans that were found, the best first, and plain `sample` among them if it can be.
        serial: one device.
        search: what the search says of its way, on the rank that searched; None where plans were only scored.
        costs: that the candidates were predicted with.
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

    def shares(self, plan: Plan) -> tuple[int, ...] | None:
        """Microbatches of each part of the batch under a plan; None where they are as even as can be."""
        shares, workload = self.workload.shares, self.workload
        axes = sample_axes(((call.layer, call.op) for call in workload.graph.calls), plan)
        return shares if shares is not None and plan.mesh.size(axes) == len(shares) else None


def score(workload: Workload, plan: Plan, costs: Costs) -> Scored:
    """Predict a plan.

    Raises:
        ConvoyError: a layer cannot be divided as the plan says.
    """
    placement = workload.place(plan)
    timeline = apart(predict(placement, costs, workload.passes), costs.update.fixed)
    return Scored(plan, placement, timeline, most(rank_memory(placement, costs)))


def know(
    workload: Workload,
    shapes: Sequence[Mesh],
    ranks: Ranks,
    *,
    links: Links | None = None,
    store: ProfileStore | None = None,
    progress: Progress = lambda what, done, total: None,
    room: float | None = None,
    plans: Sequence[Plan] = (),
) -> tuple[Knowledge, tuple[str, ...]]:
    """Measure what is needed to predict the plans that are given, or all on some meshes; all ranks call it.

    Returns:
        The costs, and notes on what was assumed.
    """
    notes = []
    per_transfer = 0.0
    devices = max((mesh.num_devices for mesh in shapes), default=1)
    if links is None and devices > 1:
        if ranks.num == devices:
            progress("measuring the links", 0, 1)
            links, per_transfer = ranks.trying(
                "measuring the links", lambda _: measured_links(shapes, workload.largest, workload.device)
            )
        else:
            links = Links(otherwise=lambda group: Rate(2e-5, 5e9).link(len(group), overlap=False, cpu_share=1.0))
            notes.append(
                f"the links between {devices} devices were not measured, as {ranks.num} run here: 5 GB/s are assumed"
            )
    jobs = jobs_for(workload, shapes, plans)
    found = measure(workload, jobs, ranks, links or Links(), store, progress, per_transfer, room)
    return found, (*notes, *found.notes)


def make_plan(
    workload: Workload,
    devices: int,
    ranks: Ranks,
    *,
    links: Links | None = None,
    store: ProfileStore | None = None,
    fixes: Sequence[str] = (),
    memory_limit: float | None = None,
    room: float | None = None,
    plans: Sequence[Plan] = (),
    input: Around | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Planned:
    """Find the fastest plan; all ranks call it, and get the same.

    Args:
        workload: what is to be trained.
        devices: that the plan is for.
        ranks: the devices at hand, on which times are measured.
        links: between the devices; None measures them where as many ranks run, and assumes them otherwise.
        store: of what was measured before.
        fixes: strategies that are given, such as `classifier.*=filter`.
        memory_limit: bytes that each device has; of `plans`, those that need more are left out.
        room: bytes that a rank has here, for rehearsals; what needs more is predicted from what needs less.
        plans: are only scored, instead of a search.
        input: of a pass on each rank; None costs nothing.
        progress: is told of long work.

    Raises:
        TooLargeError: no plan fits into memory.
        ConvoyError: a fix cannot be, or a plan is for another number of devices.
    """
    shapes = list(dict.fromkeys(plan.mesh for plan in plans)) if plans else meshes(devices)
    for plan in plans:
        if plan.mesh.num_devices != devices:
            raise ConvoyError(f"the plan {plan} is for {plan.mesh.num_devices} devices, but {devices} are asked for")
    check_optimizer(workload.optimizer)
    Layers(workload.graph, fixes, ())  # a fix that cannot be is told before anything is measured
    rooms = [limit for limit in (memory_limit, room) if limit is not None]
    knowledge, notes = know(
        workload, shapes, ranks, links=links, store=store, progress=progress, room=min(rooms, default=None), plans=plans
    )
    alone, together = (replace(one, input=input or one.input) for one in (knowledge.alone, knowledge.together))
    pace = knowledge.pace if len(knowledge.pace) == devices else ()
    workload = workload.by_speed(pace) if workload.by_speed is not None and devices > 1 else workload
    if pace:
        together = replace(together, pace=pace)
        notes = (*notes, _on_speeds(pace, workload.shares))
    costs = together if devices > 1 else alone
    results: list[SearchResult] = []  # of rank 0; the others hear of the plans
    if not plans:
        progress("searching", 0, 1)
        plans = ranks.first(partial(_search, workload, devices, costs, fixes, memory_limit, results))
    found = [score(workload, plan, costs) for plan in plans]
    if memory_limit is not None:
        found, left_out = _fitting(found, Additive(costs, workload.graph, workload.passes), memory_limit)
        notes = (*notes, *left_out)
    scored = _ordered(found)
    serial = score(workload.alone or workload, Plan(Mesh((), ())), alone)
    return Planned(workload, devices, tuple(scored), serial, next(iter(results), None), costs, notes)


def _on_speeds(pace: Sequence[float], shares: tuple[int, ...] | None) -> str:
    """A sentence on devices that are not equally fast."""
    least = min(pace)
    said = f"the devices are not equally fast: the same takes them {' : '.join(f'{own / least:.2f}' for own in pace)}"
    if shares is None or len(set(shares)) == 1:
        return f"{said}, and the slowest decides"
    where = "over all of them" if len(shares) == len(pace) else f"into {len(shares)} parts"
    return f"{said}; plans that divide samples {where} do so as --shares {','.join(map(str, shares))}"


def _fitting(scored: Sequence[Scored], costs: Additive, limit: float) -> tuple[list[Scored], list[str]]:
    """Those that fit into memory, and a note on each of the others.

    Raises:
        TooLargeError: none fits.
    """
    too_large = [one for one in scored if one.memory.total > limit]
    errors = [
        nothing_fits(one.placement, costs, one.memory.total, limit, f"the plan {one.plan} does not fit: it")
        for one in sorted(too_large, key=lambda one: one.memory.total)
    ]
    if len(too_large) == len(scored):
        raise errors[0]
    return [one for one in scored if one not in too_large], [str(error) for error in errors]


def _ordered(scored: Sequence[Scored]) -> list[Scored]:
    """By their time; but of those about as fast as the first, the one that redistributes least often comes first.

    The timeline sees more than the search, which has already chosen so: a plan that seems faster by less than the error
    of its prediction is more often luck than gain.
    """
    found = sorted(scored, key=lambda one: one.seconds)
    near = [one for one in found if one.seconds <= (1 + TOLERANCE) * found[0].seconds]
    best = min(near, key=lambda one: len(redistributions(one.placement)), default=None)
    return [one for one in found if one is best] + [one for one in found if one is not best]


def _search(
    workload: Workload,
    devices: int,
    costs: Costs,
    fixes: Sequence[str],
    memory_limit: float | None,
    results: list[SearchResult],
) -> list[Plan]:
    """The plans that the search finds, and in `results` all that it says of them."""
    found = search(
        workload.graph,
        devices,
        Additive(costs, workload.graph, workload.passes),
        parts=workload.parts,
        outputs=workload.outputs,
        fixes=fixes,
        memory_limit=memory_limit,
    )
    results.append(found)
    plans = [candidate.plan for candidate in found.candidates]
    plain = Plan.parse(f"sample={devices}" if devices > 1 else "serial")
    if plain not in plans and not fixes:
        with contextlib.suppress(ConvoyError):  # a batch that so many ranks cannot share
            placement = workload.place(plain)
            if memory_limit is None or most(rank_memory(placement, costs)).total <= memory_limit:
                plans.append(plain)
    return plans
