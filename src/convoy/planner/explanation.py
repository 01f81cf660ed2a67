"""All that is said of a plan, computed once, for text, page and JSON, whose names the fields have: where its time goes,
what holds it up, and the one change that would help most; and its text for a terminal."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from convoy.errors import ConvoyError
from convoy.ops.memory import what_is_recomputed
from convoy.planner.approximate import WORTH, Approximate, approximations
from convoy.planner.cost.prediction import RankMemory, Scored, predict
from convoy.planner.layers import (
    HOST_WAIT,
    STAGES_WAIT,
    Layer,
    Part,
    Stage,
    alternatives,
    layers_of,
    parts_of,
    stages_of,
    times_of_layers,
)
from convoy.planner.planner import Planned, passes_of
from convoy.plans.place import COMPUTE
from convoy.plans.timeline import ENGINE
from convoy.plans.traffic import stage_cells
from convoy.units import extra, per_second, plural, rough_percent, seconds, shape, shorten, size, table, times_as_fast

# `batch` is too small a batch for each device: a larger one is predicted to be faster, or the engine's own work shows.
# `division` is computing that takes longer in parts, `repeated` what runs whole on every device, `host` that GPUs wait
# for work to be issued, `stages` that these wait for each other.
Bottleneck = Literal[
    "compute", "communication", "batch", "division", "repeated", "optimizer", "input", "host", "stages"
]
ChangeKind = Literal["links", "batch", "strategy", "compute", "optimizer", "input"]
_LAYERS = 3  # layers that are tried with other strategies: those that keep others waiting longest
_ISSUING = 0.25  # part of an update in which a GPU waits for its host, from which on that is what holds it up
_SPENT_WELL = 0.9  # efficiency from which on computing itself is what takes the time
_FASTER_BATCH = 1.05  # gain of twice the batch from which on the batch is too small
_WORTH_SAYING = 1.02  # gain from which on a change is advised
_TOO_GOOD = 1.5  # efficiency beyond what caches explain
_TOO_SLOW = 1.5  # a device's computing beside all of it on one device, beyond what a plan explains
_AGAIN = "the machine was busy while times were measured; measure again when it is quiet (convoy profile --clear)"
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
class Verdict:
    """What holds a plan up."""

    kind: Bottleneck
    layer: str | None  # that holds it up, where it is one
    sentence: str  # for people
    advice: str  # the most helpful change as a sentence; empty where nothing that was tried would help


@dataclass(frozen=True)
class Explanation:
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
    def approximate(self) -> tuple[Approximate, ...]:
        """What would change the result, the fastest first."""
        return approximations(self.planned, self.scored)

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """What would make it faster, the most helpful first."""
        helpful = [change for change in _changes(self) if change.gain > 1.005]
        return tuple(sorted(helpful, key=lambda change: -change.gain))

    @cached_property
    def verdict(self) -> Verdict:
        kind, layer = _kind(self)
        by_computing = kind in ("compute", "division", "repeated")
        worth = (change for change in self.changes if change.gain >= _WORTH_SAYING)
        change = next((change for change in worth if by_computing or change.kind != "compute"), None)
        advice, serial_s = [], self.planned.serial.seconds
        if self.scored.seconds > serial_s:
            advice.append(f"One device alone is predicted to be faster, {seconds(serial_s)} an update.")
        if change is not None:
            advice.append(f"Most would be gained by {change.change}: {times_as_fast(change.gain)}.")
        return Verdict(kind, layer.layer if layer else None, _sentence(self, kind, layer), " ".join(advice))

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
        recomputed = what_is_recomputed(self.scored.placement, None if staging is None else staging.staged, passes)
        sentences += [] if recomputed is None else [recomputed]
        if self.efficiency > _TOO_GOOD:
            sentences.append(f"{planned.speedup:.1f} × on {planned.devices} devices is more than can be: {_AGAIN}")
        if self.is_too_slow:
            sentences.append(
                f"each device computes {self.computing_ratio(planned.devices)} times as long as one that does all "
                f"alone, which no plan explains: {_AGAIN}"
            )
        return tuple(sentences)

    def spent(self, *names: str) -> float:
        """Seconds of some parts."""
        return sum(part.seconds for part in self.parts if part.part in names)

    def lost(self, *names: str) -> float:
        """Seconds by which some parts take longer than their even share."""
        return sum(part.seconds - part.even_share_s for part in self.parts if part.part in names)

    def computing_ratio(self, devices: int = 1) -> str:
        """How many times its even share computing takes, or how many times as long as on one of some devices."""
        even_share_s = self.spent(*_COMPUTING) - self.lost(*_COMPUTING)
        return f"{self.spent(*_COMPUTING) / devices / even_share_s:.2f}" if even_share_s else "many"

    @property
    def is_too_slow(self) -> bool:
        """Whether each device computes longer than one that does all alone."""
        spent, devices = self.spent(*_COMPUTING), self.planned.devices
        return devices > 1 and spent > _TOO_SLOW * devices * (spent - self.lost(*_COMPUTING)) > 0

    def document(self) -> dict[str, Any]:
        """Everything as JSON has it, in seconds and bytes; lists stand in the order of the network."""
        planned, scored, search = self.planned, self.scored, self.planned.search
        record = {
            "model": planned.workload.name,
            "devices": planned.devices,
            "batch": planned.workload.batch,
            "passes": scored.passes,
            "sample": planned.workload.sample,
            "plan": _plan(scored),
            "shares": planned.shares(scored.plan),
            "slowdowns": planned.costs.slowdowns,
            "update_s": scored.seconds,
            "samples_per_s": self.samples_per_second,
            "speedup": planned.speedup,
            "efficiency": self.efficiency,
            "serial_s": planned.serial.seconds,
            "memory": _memory(scored.memory),
            "verdict": asdict(self.verdict),
            "time": list(map(asdict, self.parts)),
            "changes": list(map(asdict, self.changes)),
            "candidates": [
                {
                    "plan": _plan(plan),
                    "update_s": plan.seconds,
                    "measured_s": planned.measured.get(plan.plan),
                    "speedup": planned.speedup_of(plan),
                    "memory": _memory(plan.memory),
                }
                for plan in planned.candidates
            ],
            "approximate": list(map(asdict, self.approximate)),
            "schedule": scored.staging.schedule if scored.staging is not None else None,
            "bubble": scored.bubble,
            "stages": [asdict(stage) | {"memory": _memory(stage.memory)} for stage in self.stages],
            "layers": [
                {key: value for key, value in asdict(layer).items() if key != "stage" or value is not None}
                for layer in self.layers
            ],
            "exact": search.exact if search is not None else None,
            "notes": self.notes,
        }
        as_json_has_it: dict[str, Any] = json.loads(json.dumps(record))
        return as_json_has_it


def _plan(scored: Scored) -> dict[str, Any]:
    return {"text": str(scored.plan), **scored.plan.to_dict()}


def _memory(memory: RankMemory) -> dict[str, int]:
    return {"total": memory.total, **asdict(memory)}


def _changes(answer: Explanation) -> Iterator[Change]:
    """What the same plan is predicted to take with one thing changed."""
    planned, scored, costs, total = answer.planned, answer.scored, answer.planned.costs, answer.scored.seconds

    def again(kind: ChangeKind, text: str, **changed: Any) -> Change:
        update_s = scored.again(replace(costs, **changed))
        return Change(kind, text, total / update_s if update_s else 1.0, update_s)

    if any(span.task.stream != "compute" for span in scored.timeline.spans):
        yield again("links", "links twice as fast", links=costs.links.faster(2.0))
    if (update_s := _twice_the_batch(planned, scored)) is not None:
        text = f"a batch of {2 * planned.workload.batch} (another training)"
        yield Change("batch", text, 2 * total / update_s, update_s)
    waiting = sorted((layer for layer in answer.layers if layer.exposed_s > 0), key=lambda layer: -layer.exposed_s)
    for name, best in alternatives(planned, scored, [layer.layer for layer in waiting[:_LAYERS]]).items():
        strategy, update_s = ",".join(scored.placement.mesh.beside_stages(best.strategy)), total + best.extra_s
        yield Change("strategy", f"{name or 'the network'} by {strategy}", total / update_s, update_s)
    text = "devices that compute the layers twice as fast"
    yield again("compute", text, times=lambda op: costs.times(op) * 0.5)
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
    with contextlib.suppress(ConvoyError):
        twice = replace(workload.resized(2 * workload.samples), shares=workload.shares, bound=workload.bound)
        return predict(twice.place(scored.plan), costs).total
    return None


def _kind(answer: Explanation) -> tuple[Bottleneck, Layer | None]:
    """What takes most of the time that a perfect division would not take."""
    planned, scored, layers = answer.planned, answer.scored, answer.layers
    total, devices, lost = scored.seconds, planned.devices, answer.lost
    if answer.spent("input") > 0.5 * total:
        return "input", None
    if answer.spent(HOST_WAIT) > _ISSUING * total:
        return "host", None
    if total <= planned.serial.seconds / devices / _SPENT_WELL or devices == 1:
        longest = max(layers, key=lambda layer: layer.work_s, default=None)
        return ("optimizer", None) if answer.spent("optimizer") > 0.5 * total else ("compute", longest)
    contention = scored.timeline.contention()
    losses: dict[Bottleneck, float] = {
        "communication": contention + lost(*_SENDING),
        "compute": lost(*_COMPUTING, ENGINE) - contention,
        "optimizer": lost("optimizer"),
        "input": lost("input"),
        "stages": lost(STAGES_WAIT),
    }
    most = max(losses, key=lambda name: losses[name])
    if most == "communication":
        return most, max(layers, key=lambda layer: layer.waits_s, default=None)
    if most in ("optimizer", "input"):
        return most, None
    computes = [stage.computes_s for stage in answer.stages] or [0.0]
    if most == "stages" or max(computes) - sum(computes) / len(computes) > losses["compute"] / 2:
        return "stages", None
    alone = times_of_layers(planned.serial)

    def beyond_share(layer: Layer) -> float:
        return layer.work_s - (alone[layer.layer, "forward"] + alone[layer.layer, "backward"]) / devices

    slower = max(layers, key=beyond_share, default=None)
    if slower is not None and set(scored.placement.mesh.beside_stages(slower.strategy)) == {"replicate"}:
        return "repeated", slower
    if answer.is_too_slow:
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


def _sentence(answer: Explanation, kind: Bottleneck, layer: Layer | None) -> str:
    scored, stages, form, waits_s, name, mostly = answer.scored, answer.stages, str(kind), 0.0, "", ""

    def share(seconds_of: float) -> str:
        return rough_percent(seconds_of / (scored.seconds or 1.0))

    if layer is not None:
        waits_s, name = layer.waits_s, layer.layer or "the network itself"
        mostly = f", most of all in {name} ({share(layer.work_s)})"
    if kind == "communication" and waits_s < answer.lost(*_SENDING) / 3:
        form = "spread"
    engine_s, stage = answer.spent(ENGINE), max(stages, key=lambda stage: stage.computes_s, default=None)
    return _SENTENCES[form].format(
        name=name,
        mostly=mostly,
        waits=share(waits_s),
        computing=share(answer.spent(*_COMPUTING)),
        sending=share(answer.spent(*_SENDING)),
        optimizer=share(answer.spent("optimizer")),
        host=share(answer.spent(HOST_WAIT)),
        input=share(answer.spent("input")),
        engine=f", {ENGINE} {share(engine_s)} of an update" if engine_s else "",
        samples=answer.planned.workload.samples,
        devices=answer.planned.devices,
        ratio=answer.computing_ratio(),
        bubble=rough_percent(scored.bubble),
        stage=stages.index(stage) + 1 if stage is not None else 0,
        stage_waits=share(stage.waits_s) if stage is not None else "",
        begins=(stage.begins if stage is not None else "") or "the beginning",
    )


_LONGEST = 90  # characters of a plan in the table of candidates
_WORTH_A_ROW = 0.02  # part of an update from which on a layer without a strategy has a row
_HELD = ("parameters", "gradients", "optimizer", "activations", "buffers", "messages", "workspace")


def explanation_text(answer: Explanation, first: Sequence[str] = ()) -> str:
    """Verdict, figures, time, candidates and layers, as aligned tables, after the notes that are to come `first`; the
    other notes are at the end."""
    planned, scored, verdict = answer.planned, answer.scored, answer.verdict
    workload, shares, several = planned.workload, planned.shares(scored.plan), planned.devices > 1
    passes = f" in {scored.passes} passes of {scored.placement.batch.num_samples}" if scored.passes > 1 else ""
    on = f"{workload.name} on {planned.devices} device{'s' * several}"
    lead = f"{on}, {workload.batch} samples an update{passes}, images of {shape(workload.sample)}"
    plan = [
        f"plan {scored.plan}",
        f"with --shares {','.join(map(str, shares))}" if shares is not None else "",
        _passes(answer),
        verdict.sentence,
        verdict.advice,
    ]
    changes = [(change.change, f"{change.gain:.2f} ×", seconds(change.update_s)) for change in answer.changes]
    total, headers = scored.seconds or 1.0, ("time", "seconds", "of the update", "even share of one device's")
    parts = [
        (row.part, seconds(row.seconds), rough_percent(row.seconds / total), seconds(row.even_share_s))[: 3 + several]
        for row in answer.parts
    ]
    sections: tuple[Iterable[str], ...] = (
        [*first, "; ".join(filter(None, (lead, planned.warning(scored.seconds))))],
        filter(None, plan),
        _figures(answer),
        table(headers[: 3 + several], parts, headers[1:]),
        table(("what if", "samples/s", "update"), changes, ("samples/s", "update")) if changes else (),
        _candidates(answer) if several or len(planned.candidates) > 1 else (),
        _approximate(answer) if answer.approximate else (),
        _stages(answer) if answer.stages else (),
        _layers(answer) if several else (),
        [note for note in answer.notes if note not in first],
    )
    return "\n\n".join(filter(None, map("\n".join, sections))) + "\n"


def _passes(answer: Explanation) -> str:
    """How the batch goes through the stages, and whether `convoy train` does so where the plan is given; empty without
    stages."""
    scored, workload = answer.scored, answer.planned.workload
    if scored.staging is None:
        return ""
    best = f"{plural(scored.passes, 'pass', 'passes')}, schedule {scored.staging.schedule}"
    number = passes_of(workload, scored.plan) or 1
    requested = f"{plural(number, 'pass', 'passes')}, schedule {workload.default_schedule}"
    more = f", as convoy train runs it with --plan auto; given as a plan, it runs in {requested}"
    return f"in {best}{more if best != requested else ''}"


def _figures(answer: Explanation) -> Iterator[str]:
    planned, scored, memory = answer.planned, answer.scored, answer.scored.memory
    raced_s = planned.measured.get(scored.plan)
    race = f" ({seconds(raced_s)} in a race of plans)" if raced_s is not None else ""
    rows = {"update": f"{seconds(scored.seconds)}, {per_second(answer.samples_per_second)} samples/s{race}"}
    if planned.devices > 1:
        alone = f"{seconds(planned.serial.seconds)} on one device"
        rows["speed-up"] = f"{planned.speedup:.2f} × ({alone}), efficiency {rough_percent(answer.efficiency)}"
    if answer.stages:
        rows["bubble"] = f"{rough_percent(scored.bubble)} of the devices' time, waiting for other stages"
    held = ", ".join(f"{name} {size(getattr(memory, name))}" for name in _HELD if getattr(memory, name))
    rows["memory"] = f"{size(memory.total)} on the rank that needs most: {held}"
    width = max(map(len, rows))
    return (f"{name.ljust(width)}  {text}" for name, text in rows.items())


def _candidates(answer: Explanation) -> list[str]:
    planned, raced = answer.planned, answer.planned.measured
    serial = [] if any(plan.placement.mesh.num_devices == 1 for plan in planned.candidates) else [planned.serial]
    rows = [
        (
            "→" if plan is answer.scored else " ",
            seconds(plan.seconds),
            f"{planned.speedup_of(plan):.2f} ×",
            size(plan.memory.total),
            *([seconds(raced[plan.plan]) if plan.plan in raced else "-"] if raced else []),
            shorten(str(plan.plan), _LONGEST),
        )
        for plan in (*planned.candidates, *serial)
    ]
    headers = ("", "update", "speed-up", "memory", *(["measured"] if raced else []), "plan")
    return table(headers, rows, headers[1:-1])


def _approximate(answer: Explanation) -> list[str]:
    """What would be faster at the price of another result, if anything would."""
    exact_s = answer.scored.seconds
    rows = [
        (
            row.method,
            seconds(row.update_s),
            f"{exact_s / row.update_s:.2f} ×",
            f"{row.rounds:.2g}",
            size(round(row.sent_bytes)),
            seconds(row.compress_s),
        )
        for row in answer.approximate
        if exact_s >= WORTH * row.update_s
    ]
    if not rows:
        return ["exact is as fast: no approximate method is predicted to gain a tenth"]
    headers = ("approximate: another result", "update", "gain", "rounds per update", "sends in a round", "compressing")
    return table(headers, rows, headers[1:])


def _stages(answer: Explanation) -> list[str]:
    headers = ("stage", "begins at", "ranks", "takes the output of", "computes", "waits", "share", "sends", "memory")
    rows = []
    for number, stage in enumerate(answer.stages, 1):
        share = rough_percent(stage.waits_s / (answer.scored.seconds or 1.0))
        sends, memory = size(stage.sent_bytes), size(stage.memory.total)
        rows.append(
            (*stage_cells(number, stage), seconds(stage.computes_s), seconds(stage.waits_s), share, sends, memory)
        )
    return table(headers, rows, headers[4:])


def _layers(answer: Explanation) -> list[str]:
    mesh, least_s = answer.scored.placement.mesh, _WORTH_A_ROW * answer.scored.seconds
    axes = ",".join(mesh.beside_stages(mesh.names))
    costs = ("computes", "waits", "sends", "next best", "would cost")
    headers = ("stage", "layer", "work", f"strategy ({axes})" if axes else "strategy", "gives", *costs)
    with_row = [layer for layer in answer.layers if layer.strategy or layer.computes_s + layer.exposed_s >= least_s]
    rows: list[Sequence[str]] = [
        (
            str(layer.stage),
            layer.layer or "-",
            next((op for op in layer.ops if op in COMPUTE), layer.ops[0] if layer.ops else ""),
            ",".join(mesh.beside_stages(layer.strategy)) or "-",
            shape(layer.gives),
            seconds(layer.computes_s),
            seconds(layer.exposed_s),
            size(layer.sent_bytes),
            ",".join(mesh.beside_stages(layer.next_best.strategy)) if layer.next_best is not None else "-",
            extra(layer.next_best.extra_s) if layer.next_best is not None else "-",
        )
        for layer in with_row
    ]
    if small_layers := [layer for layer in answer.layers if layer not in with_row]:
        computes_s, waits_s = (sum(getattr(row, name) for row in small_layers) for name in ("computes_s", "exposed_s"))
        sent = size(sum(layer.sent_bytes for layer in small_layers))
        name = f"{len(small_layers)} other{'s' * (len(small_layers) > 1)}"
        rows.append(("", name, "", "", "", seconds(computes_s), seconds(waits_s), sent, "", ""))
    first = 0 if answer.stages else 1
    return table(headers[first:], [row[first:] for row in rows], ("computes", "waits", "sends", "would cost"))
