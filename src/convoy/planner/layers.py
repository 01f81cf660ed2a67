"""What each layer of a plan costs: its seconds, what it sends, and its next best strategy."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from convoy.errors import ConvoyError
from convoy.planner.cost.local_op import local_bytes
from convoy.planner.cost.prediction import RankMemory, Scored
from convoy.planner.cost.step import ADDING
from convoy.planner.planner import Planned
from convoy.planner.search.layers import compact
from convoy.planner.search.prices import AXIS_STRATEGIES, Strategy, is_choosing
from convoy.plans.explain import StageRow, rows_of_stages
from convoy.plans.layout import WHOLE
from convoy.plans.mesh import Mesh
from convoy.plans.place import Placement
from convoy.plans.traffic import cut_traffic, gradient_traffic, transfer_traffic

_PREDICTIONS = 30  # strategies that are tried one by one, where no search says what they would cost


@dataclass(frozen=True)
class Other:
    """Another strategy of a layer, and seconds by which an update would be longer with it."""

    strategy: Strategy
    seconds: float


@dataclass(frozen=True)
class Layer:
    """What a layer costs under a plan; seconds of an update, of the rank that computes longest."""

    name: str  # empty for the network itself
    ops: tuple[str, ...]  # kinds of its calls, in order
    strategy: Strategy  # one for each axis of the mesh; empty for a layer that follows its input
    takes: tuple[int, ...]  # shape of its first input on that rank
    gives: tuple[int, ...]  # shape of its last output
    forward: float
    backward: float
    copies: float  # packing and adding for messages
    exposed: float  # waiting for its messages, with nothing to compute meanwhile
    messages: float  # all of them, hidden or not
    sent: int  # bytes of an update, of the rank that sends most
    parameters: int  # bytes on the rank
    other: Other | None  # next best strategy; None where there is none, or it was not looked for
    stage: int | None = None  # in which it is called first; None for a network in one piece

    @property
    def seconds(self) -> float:
        """By which an update would be shorter without it, as far as nothing else moves."""
        return self.forward + self.backward + self.copies + self.exposed


@dataclass(frozen=True)
class Stage(StageRow):
    """What a stage of a plan costs; seconds of an update, of the rank of the stage that computes longest."""

    computes: float  # forward and backward passes, and packing
    waits: float  # with nothing to compute, for what other stages send
    sent: int  # bytes to other stages in an update
    memory: RankMemory  # of the rank that needs most


def stages_of(scored: Scored) -> tuple[Stage, ...]:
    """The stages of a plan, in order; none where it has none."""
    if scored.staging is None:
        return ()
    stages, timeline = [], scored.timeline
    rows = rows_of_stages(scored.placement, scored.staging.staged)
    for row, rank, memory in zip(rows, busiest_ranks(scored), scored.by_stage, strict=True):
        kinds = timeline.by_kind(rank)
        computes = sum(kinds.get(kind, 0.0) for kind in ("forward", "backward", "copy"))
        sent = sum(s.task.num_bytes for s in timeline.spans if s.task.rank == rank and s.task.stream == "stages")
        stages.append(Stage(row.layer, row.ranks, row.takes, row.received, computes, kinds["idle"], sent, memory))
    return tuple(stages)


def layers_of(planned: Planned, scored: Scored) -> tuple[Layer, ...]:
    """The layers of a plan in the order of the network, each on the rank of its stage that computes longest."""
    placement, timeline = scored.placement, scored.timeline
    passes = scored.passes
    stages, ranks = stages_of_calls(scored), busiest_ranks(scored)
    first: dict[str, int] = {}
    for placed, stage in zip(placement.calls, stages, strict=True):
        first.setdefault(placed.call.layer, stage)
    spent: dict[tuple[str, str], float] = defaultdict(float)
    for span in timeline.spans:
        if span.task.rank == ranks[first.get(span.task.layer, 0)] and span.task.name != ADDING:
            kind = span.task.kind if span.task.stream == "compute" else "messages"
            spent[span.task.layer, kind] += span.end - span.start
    exposed = [timeline.exposed(rank) for rank in ranks]
    sent, held = _sent(scored, passes), [_held(placement, rank) for rank in ranks]
    calls: dict[str, list[int]] = {}
    for place, placed in enumerate(placement.calls):
        calls.setdefault(placed.call.layer, []).append(place)
    next_best = _others(planned, scored, {name: sum(spent[name, k] for k in ("forward", "backward")) for name in calls})
    layers = []
    for name, places in calls.items():
        members, stage = [placement.calls[place] for place in places], first[name]
        rank = ranks[stage]
        strategy = next((placed.strategy for placed in members if is_choosing(placed.call)), ())
        layers.append(
            Layer(
                name=name,
                ops=tuple(placed.call.op for placed in members),
                strategy=strategy,
                takes=local_shape(placement, members[0].call.inputs[0], rank) if members[0].call.inputs else (),
                gives=local_shape(placement, members[-1].call.outputs[0], rank) if members[-1].call.outputs else (),
                forward=spent[name, "forward"],
                backward=spent[name, "backward"],
                copies=spent[name, "copy"],
                exposed=exposed[stage].get(name, 0.0),
                messages=spent[name, "messages"],
                sent=sent.get(name, 0),
                parameters=held[stage].get(name, 0),
                other=next_best.get(name),
                stage=stage if len(ranks) > 1 else None,
            )
        )
    return tuple(layers)


def stages_of_calls(scored: Scored) -> tuple[int, ...]:
    """The stage of every call; 0 for a network in one piece."""
    return scored.staging.staged.stages if scored.staging is not None else (0,) * len(scored.placement.calls)


def busiest_ranks(scored: Scored) -> tuple[int, ...]:
    """For each stage the rank that computes longest; of a network in one piece, that of all."""
    mesh, timeline = scored.placement.mesh, scored.timeline
    number = scored.staging.number if scored.staging is not None else 1
    of_stages = ([rank for rank in timeline.ranks if mesh.stage_of(rank) == stage] for stage in range(number))
    return (timeline.busiest,) if number == 1 else tuple(map(timeline.busiest_of, of_stages))


def local_shape(placement: Placement, name: str, rank: int) -> tuple[int, ...]:
    """The shape of a rank's part of a value, as it is kept."""
    layout = placement.layouts.get(name, WHOLE)
    return layout.local_shape(placement.graph.shape(name), placement.mesh, placement.mesh.coordinates(rank))


def alternatives(planned: Planned, scored: Scored, layers: Iterable[str]) -> dict[str, Other]:
    """The best other strategy of each of some layers, on one axis, all else as it is: every one is predicted."""
    placement, plan = scored.placement, scored.plan
    workload = planned.workload.through(plan.num_stages, scored.passes, plan.parts)
    mesh = placement.mesh
    current: dict[str, Strategy] = {}
    for placed in placement.calls:
        if is_choosing(placed.call):
            current.setdefault(placed.call.layer, placed.strategy)
    best: dict[str, Other] = {}
    for layer in layers:
        for strategy in _one_other(current[layer], mesh) if layer in current else ():
            try:
                plan = compact(mesh, {**current, layer: strategy})
                other = replace(scored, placement=workload.place(plan))
            except ConvoyError:
                continue
            seconds = other.again(planned.costs) - scored.seconds
            if layer not in best or seconds < best[layer].seconds:
                best[layer] = Other(strategy, seconds)
    return best


def _one_other(strategy: Strategy, mesh: Mesh) -> Iterator[Strategy]:
    for axis, current in enumerate(strategy):
        for other in AXIS_STRATEGIES if axis != mesh.stage_axis else ():
            if other != current:
                yield (*strategy[:axis], other, *strategy[axis + 1 :])


def _others(planned: Planned, scored: Scored, computing: Mapping[str, float]) -> dict[str, Other]:
    """The next best strategy of the layers: as the search says, or tried out for those that compute longest."""
    if not scored.placement.mesh.sizes:
        return {}
    search = planned.search
    if search is None or search.best.plan != scored.plan:
        longest = sorted(computing, key=lambda name: -computing[name])
        choosing = {placed.call.layer for placed in scored.placement.calls if is_choosing(placed.call)}
        count = _PREDICTIONS // ((len(AXIS_STRATEGIES) - 1) * len(scored.placement.mesh.sizes))
        return alternatives(planned, scored, [name for name in longest if name in choosing][: max(1, count)])
    return {
        layer: Other(one.other, one.seconds - search.best.seconds)
        for one in search.next_best
        if one.other is not None
        for layer in one.layers
    }


def _sent(scored: Scored, passes: int) -> dict[str, int]:
    """Bytes by layer; what crosses a cut is sent for the layer that gives it."""
    placement = scored.placement
    layers = {placed.call.name: placed.call.layer for placed in placement.calls}
    by_rank: dict[str, list[int]] = {}

    def add(layer: str, numbers: Iterable[int]) -> None:
        before = by_rank.setdefault(layer, [0] * placement.mesh.num_devices)
        by_rank[layer] = [a + b for a, b in zip(before, numbers, strict=True)]

    for transfer in transfer_traffic(placement):
        add(layers.get(transfer.call, ""), [passes * (one.forward + one.backward) for one in transfer.ranks])
    if scored.staging is not None:
        makers = {name: placed.call.layer for placed in placement.calls for name in placed.call.outputs}
        for crossed in cut_traffic(placement, scored.staging.staged):
            add(makers[crossed.crossing.value], [passes * (one.forward + one.backward) for one in crossed.ranks])
    first: dict[str, str] = {}
    for placed in placement.calls:
        for name in placed.call.inputs:
            first.setdefault(name, placed.call.layer)
    for name, numbers in gradient_traffic(placement).items():
        add(first.get(name, ""), numbers)
    return {layer: max(numbers) for layer, numbers in by_rank.items()}


def _held(placement: Placement, rank: int) -> dict[str, int]:
    """Bytes of parameters by layer, each where it is first used."""
    graph, held, seen = placement.graph, defaultdict[str, int](int), set[str]()
    for placed in placement.calls:
        for name in placed.call.inputs:
            if graph.values[name].origin == "parameter" and name not in seen:
                seen.add(name)
                held[placed.call.layer] += local_bytes(placement, name, rank)
    return held
