"""Where the time of a plan goes, what holds it up, and the one change that would help most."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from convoy.errors import ConvoyError
from convoy.ops.memory import what_is_recomputed
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.link import Collective, Curve, Link, Links
from convoy.planner.cost.prediction import Scored, predict
from convoy.planner.layers import Layer, Stage, alternatives, layers_of, stages_of
from convoy.planner.planner import Planned
from convoy.plans.timeline import ENGINE, is_engine
from convoy.units import rough_percent, seconds, times_as_fast

ChangeKind = Literal["links", "batch", "strategy", "compute", "optimizer", "input"]
_LAYERS = 3  # layers that are tried with other strategies: those that keep others waiting longest


@dataclass(frozen=True)
class Change:
    """One possible change."""

    kind: ChangeKind
    text: str  # a noun
    gain: float  # how many times as many samples a second
    seconds: float  # of an update


def changes(planned: Planned, scored: Scored, layers: tuple[Layer, ...]) -> tuple[Change, ...]:
    """What would make the plan faster, the most helpful first; what would not is left out."""
    helpful = [change for change in _all(planned, scored, layers) if change.gain > 1.005]
    return tuple(sorted(helpful, key=lambda change: -change.gain))


def _all(planned: Planned, scored: Scored, layers: tuple[Layer, ...]) -> Iterator[Change]:
    costs, total = planned.costs, scored.seconds

    def again(kind: ChangeKind, text: str, other: Costs) -> Change:
        seconds = scored.again(other)
        return Change(kind, text, total / seconds if seconds else 1.0, seconds)

    if any(span.task.stream != "compute" for span in scored.timeline.spans):
        yield again("links", "links twice as fast", replace(costs, links=faster(costs.links, 2.0)))
    yield from _batch(planned, scored)
    waiting = sorted((layer for layer in layers if layer.exposed > 0), key=lambda layer: -layer.exposed)
    for name, other in alternatives(planned, scored, [layer.name for layer in waiting[:_LAYERS]]).items():
        seconds = total + other.seconds
        strategy = ",".join(scored.placement.mesh.beside_stages(other.strategy))
        yield Change("strategy", f"{name or 'the network'} by {strategy}", total / seconds, seconds)
    yield again(
        "compute",
        "devices that compute the layers twice as fast",
        replace(costs, times=lambda one: costs.times(one) * 0.5),
    )
    updating = min(one.timeline.by_kind().get("update", 0.0) for one in (scored, planned.serial))
    update = replace(costs.update, fixed=costs.update.fixed - updating / 2)
    yield again("optimizer", "an optimizer that is twice as fast", replace(costs, update=update))
    cost = costs.input
    if cost.per_pass or cost.per_sample:
        cost = replace(cost, per_pass=cost.per_pass / 2, per_sample=cost.per_sample / 2)
        yield again("input", "input that is ready twice as fast", replace(costs, input=cost))


def _batch(planned: Planned, scored: Scored) -> Iterator[Change]:
    """Twice the batch: in twice as many passes where there are several, in a larger pass where there is one."""
    workload, costs = planned.workload, planned.costs
    if scored.passes > 1:
        seconds = scored.again(costs, 2 * scored.passes)
    elif workload.resized is not None:
        try:
            seconds = predict(workload.resized(2 * workload.samples).place(scored.plan), costs).total
        except ConvoyError:
            return
    else:
        return
    batch = 2 * workload.batch
    yield Change("batch", f"a batch of {batch} (another training)", 2 * scored.seconds / seconds, seconds)


def faster(links: Links, factor: float) -> Links:
    """Links that carry every message in 1/`factor` of the time."""

    def curve(measured: Curve | None) -> Curve | None:
        return measured and Curve(tuple((size, seconds / factor) for size, seconds in measured.points))

    def link(measured: Link) -> Link:
        curves: dict[str, Any] = {kind: curve(getattr(measured, kind)) for kind in get_args(Collective)}
        return replace(measured, **curves)

    otherwise = links.otherwise
    return Links(
        {ranks: link(measured) for ranks, measured in links.measured.items()},
        None if otherwise is None else lambda ranks: link(otherwise(ranks)),
    )


# `batch` is too small a batch for each device: a larger one is predicted to be faster, or the engine's own work shows.
# `division` is computing that takes longer in parts, `repeated` what runs whole on every device, `host` that GPUs wait
# for work to be issued, `stages` that these wait for each other.
Bottleneck = Literal[
    "compute", "communication", "batch", "division", "repeated", "optimizer", "input", "host", "stages"
]
_ISSUING = 0.25  # part of an update in which a GPU waits for its host, from which on that is what holds it up
_SPENT_WELL = 0.9  # efficiency from which on computing itself is what takes the time

_FASTER_BATCH = 1.05  # gain of twice the batch from which on the batch is too small
_WORTH_SAYING = 1.02  # gain from which on a change is advised
_ROUNDING = 1e-9
_TOO_GOOD = 1.5  # efficiency beyond what caches explain
_TOO_SLOW = 1.5  # A device's computing beside all of it on one device, beyond what a plan explains
_AGAIN = "measure again when it is quiet (convoy profile --clear)"
HOST = "waiting for the host"
OTHERS = "waiting for other stages"
_COMPUTING = ("forward", "backward", "loss and the rest of a pass")


@dataclass(frozen=True)
class Part:
    """A part of an update's time."""

    name: str  # for people
    seconds: float  # of the rank that computes longest
    ideal: float  # an even share of one device's time

    @property
    def lost(self) -> float:
        return self.seconds - self.ideal


@dataclass(frozen=True)
class Verdict:
    """What holds a plan up."""

    kind: Bottleneck
    layer: str | None  # that holds it up, where it is one
    sentence: str  # for people
    change: Change | None  # the most helpful; None where nothing that was tried would help
    advice: str  # the change as a sentence; empty without one


@dataclass(frozen=True)
class Explained:
    """A plan and all that is said of it."""

    planned: Planned
    scored: Scored  # the plan
    parts: tuple[Part, ...]  # in the order of a step; they add up to its time
    layers: tuple[Layer, ...]  # in the order of the network
    changes: tuple[Change, ...]  # that would make it faster, the most helpful first
    verdict: Verdict
    stages: tuple[Stage, ...] = ()  # in order

    @property
    def speedup(self) -> float:
        return self.planned.serial.seconds / self.scored.seconds if self.scored.seconds else 1.0

    @property
    def efficiency(self) -> float:
        return self.speedup / self.planned.devices

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what was assumed, left out, or is to be doubted."""
        sentences = [*self.planned.notes, *(self.planned.search.notes if self.planned.search is not None else ())]
        staging = self.scored.staging
        passes = [] if staging is None else [staging.in_flight(stage) for stage in range(staging.number)]
        again = what_is_recomputed(self.scored.placement, None if staging is None else staging.staged, passes)
        sentences += [] if again is None else [again]
        if self.efficiency > _TOO_GOOD:
            sentences.append(
                f"{self.speedup:.1f} × on {self.planned.devices} devices is more than can be: the machine was busy "
                f"while times were measured; {_AGAIN}"
            )
        if _too_slow(self.planned, self.parts):
            sentences.append(
                f"each device computes {_ratio(self.parts, 1 / self.planned.devices)} times as long as one that does "
                f"all alone, which no plan explains: the machine was busy while times were measured; {_AGAIN}"
            )
        return tuple(sentences)

    @property
    def samples_per_second(self) -> float:
        return self.planned.workload.batch / self.scored.seconds if self.scored.seconds else 0.0


def explained(planned: Planned, scored: Scored | None = None) -> Explained:
    """The explanation of the best plan, or of another candidate."""
    scored = scored or planned.best
    parts = parts_of(planned, scored)
    layers = layers_of(planned, scored)
    possible = changes(planned, scored, layers)
    verdict = _verdict(planned, scored, parts, layers, possible)
    return Explained(planned, scored, parts, layers, possible, verdict, stages_of(scored))


def parts_of(planned: Planned, scored: Scored) -> tuple[Part, ...]:
    """Where the time goes, beside an even share of one device's."""
    seconds_of, serial = _seconds(scored), _seconds(planned.serial)
    names = dict.fromkeys([*seconds_of, *serial])
    parts = [Part(name, seconds_of.get(name, 0.0), serial.get(name, 0.0) / planned.devices) for name in names]
    least = _ROUNDING * scored.seconds
    return tuple(part for part in parts if part.seconds > least or part.ideal > least)


def _seconds(scored: Scored) -> dict[str, float]:
    timeline = scored.timeline
    rank, kinds = timeline.busiest, timeline.by_kind()
    compute = [span for span in timeline.spans if span.task.rank == rank and span.task.stream == "compute"]
    before = sum(s.end - s.start for s in compute if s.task.kind == "around" and s.task.name == "input")
    engine = sum(s.end - s.start for s in compute if is_engine(s.task))
    return {
        "input": before,
        "forward": kinds.get("forward", 0.0),
        "loss and the rest of a pass": kinds.get("around", 0.0) - before - engine,
        "backward": kinds.get("backward", 0.0),
        "packing for messages": kinds.get("copy", 0.0),
        "exposed communication": kinds["exposed"],
        "optimizer": kinds.get("update", 0.0),
        ENGINE: engine,
        HOST: kinds.get("issuing", 0.0),
        "idle" if scored.staging is None else OTHERS: kinds["idle"],
    }


def _verdict(
    planned: Planned, scored: Scored, parts: tuple[Part, ...], layers: tuple[Layer, ...], possible: tuple[Change, ...]
) -> Verdict:
    total = scored.seconds
    by_name = {part.name: part for part in parts}
    kind, layer = _kind(planned, scored, by_name, layers, possible)
    by_computing = kind in ("compute", "division", "repeated")
    worth = (change for change in possible if change.gain >= _WORTH_SAYING)
    change = next((change for change in worth if by_computing or change.kind != "compute"), None)
    advice = f"Most would be gained by {change.text}: {times_as_fast(change.gain)}." if change is not None else ""
    if total > planned.serial.seconds:
        alone = f"One device alone is predicted to be faster, {seconds(planned.serial.seconds)} an update."
        advice = f"{alone} {advice}".rstrip()
    sentence = _sentence(kind, layer, planned, scored, by_name)
    return Verdict(kind, layer.name if layer else None, sentence, change, advice)


def _kind(
    planned: Planned, scored: Scored, parts: dict[str, Part], layers: tuple[Layer, ...], possible: tuple[Change, ...]
) -> tuple[Bottleneck, Layer | None]:
    """What takes most of the time that a perfect division would not take."""
    total, ideal = scored.seconds, planned.serial.seconds / planned.devices
    input_seconds = parts["input"].seconds if "input" in parts else 0.0
    longest = max(layers, key=lambda layer: layer.forward + layer.backward, default=None)
    if input_seconds > 0.5 * total:
        return "input", None
    if HOST in parts and parts[HOST].seconds > _ISSUING * total:
        return "host", None
    if total <= ideal / _SPENT_WELL or planned.devices == 1:
        updating = parts["optimizer"].seconds if "optimizer" in parts else 0.0
        return ("optimizer", None) if updating > 0.5 * total else ("compute", longest)
    contention = scored.timeline.contention()
    lost: dict[Bottleneck, float] = {
        "communication": contention + _lost(parts, "packing for messages", "exposed communication"),
        "compute": _lost(parts, "forward", "backward", "loss and the rest of a pass", ENGINE) - contention,
        "optimizer": _lost(parts, "optimizer"),
        "input": _lost(parts, "input"),
        "stages": _lost(parts, OTHERS),
    }
    most = max(lost, key=lambda name: lost[name])
    if most == "communication":
        return most, max(layers, key=lambda layer: layer.exposed + layer.copies, default=None)
    if most in ("optimizer", "input"):
        return most, None
    computes = [stage.computes for stage in stages_of(scored)] or [0.0]
    uneven = max(computes) - sum(computes) / len(computes)
    if most == "stages" or uneven > lost["compute"] / 2:
        return "stages", None
    slower = _slower(planned, layers)
    if slower is not None and set(scored.placement.mesh.beside_stages(slower.strategy)) == {"replicate"}:
        return "repeated", slower
    if _too_slow(planned, tuple(parts.values())):
        return "division", slower
    larger = any(change.kind == "batch" and change.gain >= _FASTER_BATCH for change in possible)
    return ("batch" if larger or _lost(parts, ENGINE) > lost["compute"] / 2 else "division"), slower


def _lost(parts: dict[str, Part], *names: str) -> float:
    return sum(parts[name].lost for name in names if name in parts)


def _too_slow(planned: Planned, parts: tuple[Part, ...]) -> bool:
    computing = [part for part in parts if part.name in _COMPUTING]
    alone = planned.devices * sum(part.ideal for part in computing)
    return planned.devices > 1 and sum(part.seconds for part in computing) > _TOO_SLOW * alone > 0


def _slower(planned: Planned, layers: tuple[Layer, ...]) -> Layer | None:
    """The layer whose computing is furthest beyond an even share of one device's."""
    serial = {layer.name: layer for layer in layers_of(planned, planned.serial)}

    def beyond(layer: Layer) -> float:
        alone = serial.get(layer.name)
        ideal = (alone.forward + alone.backward) / planned.devices if alone is not None else 0.0
        return layer.forward + layer.backward - ideal

    return max(layers, key=beyond, default=None)


_SENTENCES: dict[str, str] = {
    "compute": "Compute-bound: {computing} of an update is computing{mostly}.",
    "communication": "Communication-bound in {name}: {sending} of an update is sending and waiting, {waits} for this "
    "layer.",
    "spread": "Communication-bound: {sending} of an update is sending and waiting, spread over many layers, most in "
    "{name} ({waits}).",
    "batch": "Too small a batch per device: a pass of {samples} samples is little for {devices} devices, and computing "
    "takes {ratio} times its even share (most in {name}){engine}.",
    "division": "Computing divides badly: it takes {ratio} times its even share, most in {name}. Parts of a layer may "
    "be too small to be fast, or the devices share a memory.",
    "repeated": "Work is repeated: {name} runs whole on every device, as no other strategy pays; computing takes "
    "{ratio} times its even share.",
    "optimizer": "Bound by the optimizer: {optimizer} of an update is changing the weights.",
    "host": "Bound by the host: for {host} of an update the device waits for work to be issued, so that a larger batch "
    "takes hardly longer.",
    "stages": "Bound by the stages: devices wait for other stages for {bubble} of an update, those that compute "
    "longest for {stage_waits}; most is computed in stage {stage}, from {begins} on.",
    "input": "Input-bound: {input} of an update is getting the input ready.",
}


def _sentence(kind: Bottleneck, layer: Layer | None, planned: Planned, scored: Scored, parts: dict[str, Part]) -> str:
    total, stages = scored.seconds or 1.0, stages_of(scored)

    def share(*names: str) -> str:
        return rough_percent(sum(parts[name].seconds for name in names if name in parts) / total)

    waits, name, mostly, form = 0.0, "", "", str(kind)
    if layer is not None:
        waits, name = layer.exposed + layer.copies, layer.name or "the network itself"
        mostly = f", most of all in {name} ({rough_percent((layer.forward + layer.backward) / total)})"
    if kind == "communication" and waits < _lost(parts, "exposed communication", "packing for messages") / 3:
        form = "spread"
    longest = max(range(len(stages)), key=lambda number: stages[number].computes, default=0)
    return _SENTENCES[form].format(
        name=name,
        mostly=mostly,
        waits=rough_percent(waits / total),
        computing=share(*_COMPUTING),
        sending=share("exposed communication", "packing for messages"),
        optimizer=share("optimizer"),
        host=share(HOST),
        input=share("input"),
        engine=f", {ENGINE} {share(ENGINE)} of an update" if ENGINE in parts else "",
        samples=planned.workload.samples,
        devices=planned.devices,
        ratio=_ratio(parts.values()),
        bubble=rough_percent(scored.bubble),
        stage=longest + 1,
        stage_waits=rough_percent(stages[longest].waits / total) if stages else "",
        begins=(stages[longest].layer if stages else "") or "the beginning",
    )


def _ratio(parts: Iterable[Part], part: float = 1.0) -> str:
    """How many times its even share computing takes, or a part of it."""
    computing = [one for one in parts if one.name in _COMPUTING]
    ideal = sum(one.ideal for one in computing)
    return f"{part * sum(one.seconds for one in computing) / ideal:.2f}" if ideal else "many"
