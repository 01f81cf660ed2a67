"""Where the time of a plan goes: parts of an update, layers, stages; what they send, and a layer's next best strategy.

The fields are called as `convoy plan --json` has them.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

from convoy.errors import ConvoyError
from convoy.planner.cost.prediction import RankMemory, Scored
from convoy.planner.cost.step import ADDING
from convoy.planner.planner import Planned
from convoy.planner.search.layers import compact
from convoy.planner.search.prices import AXIS_STRATEGIES, Strategy, is_choosing
from convoy.planner.search.search import NextBest
from convoy.plans.mesh import ranks_of
from convoy.plans.place import PlacedCall
from convoy.plans.timeline import ENGINE
from convoy.plans.traffic import StageRow, cut_traffic, gradient_traffic, rows_of_stages, transfer_traffic

_ROUNDING = 1e-9
HOST_WAIT, STAGES_WAIT = "waiting for the host", "waiting for other stages"
# The parts of an update for people, in the order of a step, by the kinds of a timeline (`Timeline.by_kind`)
PARTS = {
    "input": "input",
    "forward": "forward",
    "loss and the rest of a pass": "around",
    "backward": "backward",
    "packing for messages": "copy",
    "exposed communication": "exposed",
    "optimizer": "update",
    ENGINE: "engine",
    HOST_WAIT: "issuing",
    "idle": "idle",
    STAGES_WAIT: "idle",
}


@dataclass(frozen=True)
class Part:
    """A part of an update's time."""

    part: str  # for people
    seconds: float  # of the rank that computes longest
    even_share_s: float  # of one device's time


def parts_of(planned: Planned, scored: Scored) -> tuple[Part, ...]:
    """Where the time goes, beside an even share of one device's."""
    kinds, serial = scored.timeline.by_kind(), planned.serial.timeline.by_kind()
    parts = []
    for part, kind in PARTS.items():
        waits_for_stages = part == STAGES_WAIT
        seconds_of = kinds.get(kind, 0.0) if kind != "idle" or waits_for_stages == (scored.staging is not None) else 0.0
        even_share_s = 0.0 if waits_for_stages else serial.get(kind, 0.0) / planned.devices
        if max(seconds_of, even_share_s) > _ROUNDING * scored.seconds:
            parts.append(Part(part, seconds_of, even_share_s))
    return tuple(parts)


_PREDICTIONS = 30  # strategies that are tried one by one, where no search says what they would cost
_COMPUTING = ("forward", "backward", "copy")


@dataclass(frozen=True)
class Layer:
    """What a layer costs under a plan; seconds of an update, of the rank that computes longest."""

    layer: str  # its name, empty for the network itself
    stage: int | None  # in which it is called first, from 1; None for a network in one piece
    ops: tuple[str, ...]  # kinds of its calls, in order
    strategy: Strategy  # one for each axis of the mesh; empty for a layer that follows its input
    takes: tuple[int, ...]  # shape of its first input on that rank
    gives: tuple[int, ...]  # shape of its last output
    forward_s: float
    backward_s: float
    copies_s: float  # packing and adding for messages
    exposed_s: float  # waiting for its messages, with nothing to compute meanwhile
    messages_s: float  # all of them, hidden or not
    sent_bytes: int  # of an update, of the rank that sends most
    parameter_bytes: int  # on the rank
    next_best: NextBest | None  # None where there is none, or it was not looked for

    @property
    def work_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def computes_s(self) -> float:
        return self.work_s + self.copies_s

    @property
    def waits_s(self) -> float:
        """For messages, and what is packed for them."""
        return self.copies_s + self.exposed_s


@dataclass(frozen=True)
class Stage(StageRow):
    """What a stage of a plan costs; seconds of an update, of the rank of the stage that computes longest."""

    computes_s: float  # forward and backward passes, and packing
    waits_s: float  # with nothing to compute, for what other stages send
    sent_bytes: int  # to other stages in an update
    memory: RankMemory  # of the rank that needs most


def stages_of(scored: Scored) -> tuple[Stage, ...]:
    """The stages of a plan, in order; none where it has none."""
    if scored.staging is None:
        return ()
    stages, timeline = [], scored.timeline
    rows = rows_of_stages(scored.placement, scored.staging.staged)
    for row, rank, memory in zip(rows, busiest_ranks(scored), scored.by_stage, strict=True):
        kinds = timeline.by_kind(rank)
        sent = sum(s.task.num_bytes for s in timeline.spans if s.task.rank == rank and s.task.stream == "stages")
        computes_s = sum(kinds.get(kind, 0.0) for kind in _COMPUTING)
        stages.append(Stage(**vars(row), computes_s=computes_s, waits_s=kinds["idle"], sent_bytes=sent, memory=memory))
    return tuple(stages)


def layers_of(planned: Planned, scored: Scored) -> tuple[Layer, ...]:
    """The layers of a plan in the order of the network, each on the rank of its stage that computes longest."""
    placement, ranks, first_user = scored.placement, busiest_ranks(scored), dict[str, str]()
    members: dict[str, list[PlacedCall]] = {}
    for placed in placement.calls:
        members.setdefault(placed.call.layer, []).append(placed)
        for name in placed.call.inputs:
            first_user.setdefault(name, placed.call.layer)
    stages, times = stages_of_layers(scored), times_of_layers(scored)
    exposed = [scored.timeline.exposed(rank) for rank in ranks]
    sends, holds = _sent(scored, first_user), defaultdict[str, int](int)
    for name, layer in first_user.items():
        if placement.graph.values[name].origin == "parameter":
            holds[layer] += placement.local_bytes(name, ranks[stages[layer]])
    next_best = _next_best(planned, scored, {name: times[name, "forward"] + times[name, "backward"] for name in stages})
    layers = []
    for name, placed_calls in members.items():
        stage, rank = stages[name], ranks[stages[name]]
        inputs, outputs = placed_calls[0].call.inputs, placed_calls[-1].call.outputs
        layers.append(
            Layer(
                layer=name,
                stage=stage + 1 if len(ranks) > 1 else None,
                ops=tuple(placed.call.op for placed in placed_calls),
                strategy=next((placed.strategy for placed in placed_calls if is_choosing(placed.call)), ()),
                takes=placement.local_shape(inputs[0], rank) if inputs else (),
                gives=placement.local_shape(outputs[0], rank) if outputs else (),
                forward_s=times[name, "forward"],
                backward_s=times[name, "backward"],
                copies_s=times[name, "copy"],
                exposed_s=exposed[stage].get(name, 0.0),
                messages_s=times[name, "messages"],
                sent_bytes=sends.get(name, 0),
                parameter_bytes=holds[name],
                next_best=next_best.get(name),
            )
        )
    return tuple(layers)


def stages_of_calls(scored: Scored) -> tuple[int, ...]:
    """The stage of every call; 0 for a network in one piece."""
    return scored.staging.staged.stages if scored.staging is not None else (0,) * len(scored.placement.calls)


def stages_of_layers(scored: Scored) -> dict[str, int]:
    """The stage in which every layer is called first."""
    pairs = zip(scored.placement.calls, stages_of_calls(scored), strict=True)
    return {placed.call.layer: stage for placed, stage in [*pairs][::-1]}


def times_of_layers(scored: Scored) -> dict[tuple[str, str], float]:
    """Seconds of every layer by kind of computing, and of its `messages`, on the rank of its stage that computes
    longest."""
    ranks, stages, times = busiest_ranks(scored), stages_of_layers(scored), defaultdict[tuple[str, str], float](float)
    for span in scored.timeline.spans:
        task = span.task
        if task.rank == ranks[stages.get(task.layer, 0)] and task.name != ADDING:
            times[task.layer, task.kind if task.stream == "compute" else "messages"] += span.end - span.start
    return times


def busiest_ranks(scored: Scored) -> tuple[int, ...]:
    """For each stage the rank that computes longest; of a network in one piece, that of all."""
    number = scored.staging.number if scored.staging is not None else 1
    return tuple(scored.timeline.busiest_of(ranks_of(scored.placement.mesh, stage)) for stage in range(number))


def alternatives(planned: Planned, scored: Scored, layers: Iterable[str]) -> dict[str, NextBest]:
    """The best other strategy of each of some layers, on one axis, all else as it is: every one is predicted."""
    plan, mesh = scored.plan, scored.placement.mesh
    workload = planned.workload.through(plan.num_stages, scored.passes, plan.parts)
    strategy_of: dict[str, Strategy] = {}
    for placed in scored.placement.calls:
        if is_choosing(placed.call):
            strategy_of.setdefault(placed.call.layer, placed.strategy)
    best: dict[str, NextBest] = {}
    axes = [axis for axis in mesh.axes if axis != mesh.stage_axis]
    for layer, axis, strategy in product(filter(strategy_of.__contains__, layers), axes, AXIS_STRATEGIES):
        if strategy == strategy_of[layer][axis]:
            continue
        strategies = (*strategy_of[layer][:axis], strategy, *strategy_of[layer][axis + 1 :])
        try:
            changed = replace(scored, placement=workload.place(compact(mesh, {**strategy_of, layer: strategies})))
        except ConvoyError:
            continue
        pairs = zip(changed.placement.calls, scored.placement.calls, strict=True)
        if all(one.placed == other.placed for one, other in pairs if one.call.layer == layer):
            continue  # the same by another name, such as `height` for a linear layer, which then follows its input
        extra_s = changed.again(planned.costs) - scored.seconds
        if layer not in best or extra_s < best[layer].extra_s:
            best[layer] = NextBest(strategies, extra_s)
    return best


def _next_best(planned: Planned, scored: Scored, work_s: dict[str, float]) -> dict[str, NextBest]:
    """The next best strategy of the layers: as the search says, or tried out for those that compute longest."""
    axes, search = len(scored.placement.mesh.sizes), planned.search
    if not axes:
        return {}
    if search is not None and search.best.plan == scored.plan:
        return search.next_best
    choosing = dict.fromkeys(placed.call.layer for placed in scored.placement.calls if is_choosing(placed.call))
    names = sorted(choosing, key=lambda name: -work_s[name])
    return alternatives(planned, scored, names[: max(1, _PREDICTIONS // ((len(AXIS_STRATEGIES) - 1) * axes))])


def _sent(scored: Scored, first_user: dict[str, str]) -> dict[str, int]:
    """Bytes by layer; what crosses a cut is sent for the layer that gives it."""
    placement, staging = scored.placement, scored.staging
    layers = {placed.call.name: placed.call.layer for placed in placement.calls}
    makers = {name: placed.call.layer for placed in placement.calls for name in placed.call.outputs}
    messages = [(layers.get(message.call, ""), message.ranks) for message in transfer_traffic(placement)]
    for crossed in cut_traffic(placement, staging.staged) if staging is not None else ():
        messages.append((makers[crossed.crossing.value], crossed.ranks))
    of_ranks: dict[str, list[int]] = defaultdict(lambda: [0] * placement.mesh.num_devices)
    for layer, ranks in messages:
        for rank, traffic in enumerate(ranks):
            of_ranks[layer][rank] += scored.passes * (traffic.forward + traffic.backward)
    for name, numbers in gradient_traffic(placement).items():
        layer = first_user.get(name, "")
        of_ranks[layer] = [sum(pair) for pair in zip(of_ranks[layer], numbers, strict=True)]
    return {layer: max(numbers) for layer, numbers in of_ranks.items()}
