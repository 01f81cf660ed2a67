"""Where the time of a plan goes, what holds it up, and the one change that would help most: all that is said of a plan,
computed once, for text, page and JSON, whose names the fields have."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from convoy.errors import ConvoyError
from convoy.ops.memory import what_is_recomputed
from convoy.planner.cost.link import Collective, Curve, Link, Links
from convoy.planner.cost.prediction import Scored, predict
from convoy.planner.layers import Layer, Stage, alternatives, layers_of, stages_of
from convoy.planner.planner import Planned
from convoy.plans.timeline import ENGINE, is_engine
from convoy.units import rough_percent, seconds, times_as_fast

ChangeKind = Literal["links", "batch", "strategy", "compute", "optimizer", "input"]
# `batch` is too small a batch for each device: a larger one is predicted to be faster, or the engine's own work shows.
# `division` is computing that takes longer in parts, `repeated` what runs whole on every device, `host` that GPUs wait
# for work to be issued, `stages` that these wait for each other.
Bottleneck = Literal[
    "compute", "communication", "batch", "division", "repeated", "optimizer", "input", "host", "stages"
]
_LAYERS = 3  # layers that are tried with other strategies: those that keep others waiting longest
_ISSUING = 0.25  # part of an update in which a GPU waits for its host, from which on that is what holds it up
_SPENT_WELL = 0.9  # efficiency from which on computing itself is what takes the time
_FASTER_BATCH = 1.05  # gain of twice the batch from which on the batch is too small
_WORTH_SAYING = 1.02  # gain from which on a change is advised
_ROUNDING = 1e-9
_TOO_GOOD = 1.5  # efficiency beyond what caches explain
_TOO_SLOW = 1.5  # a device's computing beside all of it on one device, beyond what a plan explains
_AGAIN = "the machine was busy while times were measured; measure again when it is quiet (convoy profile --clear)"
HOST = "waiting for the host"
OTHERS = "waiting for other stages"
_COMPUTING = ("forward", "backward", "loss and the rest of a pass")
_SENDING = ("packing for messages", "exposed communication")


@dataclass(frozen=True)
class Change:
    """One possible change."""

    kind: ChangeKind
    change: str  # a noun
    gain: float  # how many times as many samples a second
    update_s: float


@dataclass(frozen=True)
class Part:
    """A part of an update's time."""

    part: str  # for people
    seconds: float  # of the rank that computes longest
    even_share_s: float  # of one device's time


@dataclass(frozen=True)
class Verdict:
    """What holds a plan up."""

    kind: Bottleneck
    layer: str | None  # that holds it up, where it is one
    sentence: str  # for people
    advice: str  # the most helpful change as a sentence; empty where nothing that was tried would help


@dataclass(frozen=True)
class Explained:
    """The plan that the planner found, and all that is said of it."""

    planned: Planned

    @property
    def scored(self) -> Scored:
        return self.planned.best

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """In the order of a step; they add up to its time."""
        return parts_of(self.planned, self.scored)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """In the order of the network."""
        return layers_of(self.planned, self.scored)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """In order; none where the network is in one piece."""
        return stages_of(self.scored)

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """What would make it faster, the most helpful first."""
        helpful = [change for change in _changes(self.planned, self.scored, self.layers) if change.gain > 1.005]
        return tuple(sorted(helpful, key=lambda change: -change.gain))

    @cached_property
    def verdict(self) -> Verdict:
        return _verdict(self)

    @property
    def efficiency(self) -> float:
        return self.planned.speedup / self.planned.devices

    @property
    def samples_per_second(self) -> float:
        return self.planned.workload.batch / self.scored.seconds if self.scored.seconds else 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what was assumed, left out, or is to be doubted."""
        planned, staging = self.planned, self.scored.staging
        sentences = [*planned.notes, *(planned.search.notes if planned.search is not None else ())]
        passes = [] if staging is None else [staging.in_flight(stage) for stage in range(staging.number)]
        again = what_is_recomputed(self.scored.placement, None if staging is None else staging.staged, passes)
        sentences += [] if again is None else [again]
        if self.efficiency > _TOO_GOOD:
            sentences.append(f"{planned.speedup:.1f} × on {planned.devices} devices is more than can be: {_AGAIN}")
        if _too_slow(planned.devices, self.parts):
            sentences.append(
                f"each device computes {_ratio(self.parts, 1 / planned.devices)} times as long as one that does all "
                f"alone, which no plan explains: {_AGAIN}"
            )
        return tuple(sentences)


def parts_of(planned: Planned, scored: Scored) -> tuple[Part, ...]:
    """Where the time goes, beside an even share of one device's."""
    seconds_of, serial = _seconds(scored), _seconds(planned.serial)
    names = dict.fromkeys([*seconds_of, *serial])
    parts = [Part(name, seconds_of.get(name, 0.0), serial.get(name, 0.0) / planned.devices) for name in names]
    return tuple(part for part in parts if max(part.seconds, part.even_share_s) > _ROUNDING * scored.seconds)


def _seconds(scored: Scored) -> dict[str, float]:
    timeline = scored.timeline
    kinds = timeline.by_kind()
    around = [s for s in timeline.spans if s.task.rank == timeline.busiest and s.task.kind == "around"]
    before = sum(s.end - s.start for s in around if s.task.stream == "compute" and s.task.name == "input")
    engine = sum(s.end - s.start for s in around if s.task.stream == "compute" and is_engine(s.task))
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


def _changes(planned: Planned, scored: Scored, layers: tuple[Layer, ...]) -> Iterator[Change]:
    """What the same plan is predicted to take with one thing changed."""
    costs, total = planned.costs, scored.seconds

    def again(kind: ChangeKind, text: str, **changed: Any) -> Change:
        update_s = scored.again(replace(costs, **changed))
        return Change(kind, text, total / update_s if update_s else 1.0, update_s)

    if any(span.task.stream != "compute" for span in scored.timeline.spans):
        yield again("links", "links twice as fast", links=_faster(costs.links, 2.0))
    if (update_s := _twice_the_batch(planned, scored)) is not None:
        text = f"a batch of {2 * planned.workload.batch} (another training)"
        yield Change("batch", text, 2 * total / update_s, update_s)
    waiting = sorted((layer for layer in layers if layer.exposed_s > 0), key=lambda layer: -layer.exposed_s)
    for name, other in alternatives(planned, scored, [layer.layer for layer in waiting[:_LAYERS]]).items():
        strategy, update_s = ",".join(scored.placement.mesh.beside_stages(other.strategy)), total + other.extra_s
        yield Change("strategy", f"{name or 'the network'} by {strategy}", total / update_s, update_s)
    text = "devices that compute the layers twice as fast"
    yield again("compute", text, times=lambda one: costs.times(one) * 0.5)
    update = replace(costs.update, per_byte=costs.update.per_byte / 2, per_tensor=costs.update.per_tensor / 2)
    yield again("optimizer", "an optimizer that is twice as fast", update=update)
    if costs.input.per_pass or costs.input.per_sample:
        half = replace(costs.input, per_pass=costs.input.per_pass / 2, per_sample=costs.input.per_sample / 2)
        yield again("input", "input that is ready twice as fast", input=half)


def _twice_the_batch(planned: Planned, scored: Scored) -> float | None:
    """Seconds of an update in twice as many passes where there are several, in a larger pass where there is one; None
    where that cannot be."""
    workload, costs = planned.workload, planned.costs
    if scored.passes > 1:
        return scored.again(costs, 2 * scored.passes)
    try:
        larger = workload.resized(2 * workload.samples) if workload.resized is not None else None
        return None if larger is None else predict(larger.place(scored.plan), costs).total
    except ConvoyError:
        return None


def _faster(links: Links, factor: float) -> Links:
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


def _verdict(answer: Explained) -> Verdict:
    total, serial_s = answer.scored.seconds, answer.planned.serial.seconds
    kind, layer = _kind(answer, {part.part: part for part in answer.parts})
    by_computing = kind in ("compute", "division", "repeated")
    worth = (change for change in answer.changes if change.gain >= _WORTH_SAYING)
    change = next((change for change in worth if by_computing or change.kind != "compute"), None)
    advice = []
    if total > serial_s:
        advice.append(f"One device alone is predicted to be faster, {seconds(serial_s)} an update.")
    if change is not None:
        advice.append(f"Most would be gained by {change.change}: {times_as_fast(change.gain)}.")
    return Verdict(kind, layer.layer if layer else None, _sentence(answer, kind, layer), " ".join(advice))


def _kind(answer: Explained, parts: Mapping[str, Part]) -> tuple[Bottleneck, Layer | None]:
    """What takes most of the time that a perfect division would not take."""
    planned, scored, layers = answer.planned, answer.scored, answer.layers

    def spent(name: str) -> float:
        return parts[name].seconds if name in parts else 0.0

    def lost(*names: str) -> float:
        return sum(parts[name].seconds - parts[name].even_share_s for name in names if name in parts)

    total = scored.seconds
    if spent("input") > 0.5 * total:
        return "input", None
    if spent(HOST) > _ISSUING * total:
        return "host", None
    if total <= planned.serial.seconds / planned.devices / _SPENT_WELL or planned.devices == 1:
        longest = max(layers, key=lambda layer: layer.work_s, default=None)
        return ("optimizer", None) if spent("optimizer") > 0.5 * total else ("compute", longest)
    contention = scored.timeline.contention()
    losses: dict[Bottleneck, float] = {
        "communication": contention + lost(*_SENDING),
        "compute": lost(*_COMPUTING, ENGINE) - contention,
        "optimizer": lost("optimizer"),
        "input": lost("input"),
        "stages": lost(OTHERS),
    }
    most = max(losses, key=lambda name: losses[name])
    if most == "communication":
        return most, max(layers, key=lambda layer: layer.waits_s, default=None)
    if most in ("optimizer", "input"):
        return most, None
    computes = [stage.computes_s for stage in answer.stages] or [0.0]
    if most == "stages" or max(computes) - sum(computes) / len(computes) > losses["compute"] / 2:
        return "stages", None
    alone = {layer.layer: layer.work_s for layer in layers_of(planned, planned.serial)}
    beyond_share = {layer.layer: layer.work_s - alone.get(layer.layer, 0.0) / planned.devices for layer in layers}
    slower = max(layers, key=lambda layer: beyond_share[layer.layer], default=None)
    if slower is not None and set(scored.placement.mesh.beside_stages(slower.strategy)) == {"replicate"}:
        return "repeated", slower
    if _too_slow(planned.devices, answer.parts):
        return "division", slower
    larger = any(change.kind == "batch" and change.gain >= _FASTER_BATCH for change in answer.changes)
    return ("batch" if larger or lost(ENGINE) > losses["compute"] / 2 else "division"), slower


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


def _sentence(answer: Explained, kind: Bottleneck, layer: Layer | None) -> str:
    scored, stages = answer.scored, answer.stages
    total, form, waits_s, name, mostly = scored.seconds or 1.0, str(kind), 0.0, "", ""

    def share(*names: str) -> str:
        return rough_percent(sum(part.seconds for part in answer.parts if part.part in names) / total)

    if layer is not None:
        waits_s, name = layer.waits_s, layer.layer or "the network itself"
        mostly = f", most of all in {name} ({rough_percent(layer.work_s / total)})"
    lost = sum(part.seconds - part.even_share_s for part in answer.parts if part.part in _SENDING)
    if kind == "communication" and waits_s < lost / 3:
        form = "spread"
    longest = max(range(len(stages)), key=lambda number: stages[number].computes_s, default=0)
    return _SENTENCES[form].format(
        name=name,
        mostly=mostly,
        waits=rough_percent(waits_s / total),
        computing=share(*_COMPUTING),
        sending=share(*_SENDING),
        optimizer=share("optimizer"),
        host=share(HOST),
        input=share("input"),
        engine=f", {ENGINE} {share(ENGINE)} of an update" if any(one.part == ENGINE for one in answer.parts) else "",
        samples=answer.planned.workload.samples,
        devices=answer.planned.devices,
        ratio=_ratio(answer.parts),
        bubble=rough_percent(scored.bubble),
        stage=longest + 1,
        stage_waits=rough_percent(stages[longest].waits_s / total) if stages else "",
        begins=(stages[longest].begins if stages else "") or "the beginning",
    )


def _computing(parts: Iterable[Part]) -> tuple[float, float]:
    """Seconds of computing, and its even share."""
    computing = [part for part in parts if part.part in _COMPUTING]
    return sum(part.seconds for part in computing), sum(part.even_share_s for part in computing)


def _too_slow(devices: int, parts: Iterable[Part]) -> bool:
    spent, even_share = _computing(parts)
    return devices > 1 and spent > _TOO_SLOW * devices * even_share > 0


def _ratio(parts: Iterable[Part], part: float = 1.0) -> str:
    """How many times its even share computing takes, or a part of it."""
    spent, even_share = _computing(parts)
    return f"{part * spent / even_share:.2f}" if even_share else "many"
