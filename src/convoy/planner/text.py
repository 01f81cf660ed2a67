"""The explanation of a plan as text for a terminal and as JSON has it; predicted and measured updates as traces."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, get_args

from convoy.planner.cost.prediction import RankMemory, Scored
from convoy.planner.layers import Layer
from convoy.planner.planner import Planned, passes_of
from convoy.planner.verdict import Explained
from convoy.plans.explain import stage_cells
from convoy.plans.place import COMPUTE
from convoy.plans.timeline import Span, Stream, Timeline
from convoy.units import extra, per_second, plural, rough_percent, seconds, shape, shorten, size, table

_LONGEST = 90  # characters of a plan in the table of candidates
_WORTH_A_ROW = 0.02  # part of an update from which on a layer without a strategy has a row


def explanation_text(answer: Explained, first: Sequence[str] = ()) -> str:
    """Verdict, figures, time, candidates and layers, as aligned tables, after the notes that are to come `first`; the
    other notes are at the end."""
    planned, scored, verdict = answer.planned, answer.scored, answer.verdict
    workload, shares = planned.workload, planned.shares(scored.plan)
    passes = f" in {scored.passes} passes of {scored.placement.batch.num_samples}" if scored.passes > 1 else ""
    several = planned.devices > 1
    on = f"{workload.name} on {planned.devices} device{'s' * several}"
    lead = f"{on}, {workload.batch} samples an update{passes}, images of {shape(workload.sample)}"
    plan = [
        f"plan {scored.plan}",
        f"with --shares {','.join(map(str, shares))}" if shares is not None else "",
        _passes(planned, scored),
        verdict.sentence,
        verdict.advice,
    ]
    changes = [(change.change, f"{change.gain:.2f} ×", seconds(change.update_s)) for change in answer.changes]
    sections: tuple[Iterable[str], ...] = (
        [*first, "; ".join(filter(None, (lead, planned.warning(scored.seconds))))],
        filter(None, plan),
        _figures(answer),
        _parts(answer),
        table(("what if", "samples/s", "update"), changes, ("samples/s", "update")) if changes else (),
        _candidates(answer) if several or len(planned.candidates) > 1 else (),
        _stages(answer) if answer.stages else (),
        _layers(answer) if several else (),
        [note for note in answer.notes if note not in first],
    )
    return "\n\n".join(filter(None, map("\n".join, sections))) + "\n"


def _passes(planned: Planned, scored: Scored) -> str:
    """How the batch goes through the stages, and whether `convoy train` does so where the plan is given; empty without
    stages."""
    if scored.staging is None:
        return ""
    best = f"{plural(scored.passes, 'pass', 'passes')}, schedule {scored.staging.schedule}"
    usual = passes_of(planned.workload, scored.plan) or 1
    requested = f"{plural(usual, 'pass', 'passes')}, schedule {planned.workload.default_schedule}"
    other = f", as convoy train runs it with --plan auto; given as a plan, it runs in {requested}"
    return f"in {best}{other if best != requested else ''}"


_HELD = ("parameters", "gradients", "optimizer", "activations", "buffers", "messages", "workspace")


def _figures(answer: Explained) -> Iterator[str]:
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


def _parts(answer: Explained) -> list[str]:
    total, several = answer.scored.seconds or 1.0, answer.planned.devices > 1
    headers = ("time", "seconds", "of the update", *(["even share of one device's"] * several))
    rows = [
        (one.part, seconds(one.seconds), rough_percent(one.seconds / total), *([seconds(one.even_share_s)] * several))
        for one in answer.parts
    ]
    return table(headers, rows, headers[1:])


def _candidates(answer: Explained) -> list[str]:
    planned, raced = answer.planned, answer.planned.measured
    alone = [] if any(one.placement.mesh.num_devices == 1 for one in planned.candidates) else [planned.serial]
    headers = ("", "update", "speed-up", "memory", *(["measured"] if raced else []), "plan")
    rows = [
        (
            "→" if one is answer.scored else " ",
            seconds(one.seconds),
            f"{planned.serial.seconds / one.seconds:.2f} ×" if one.seconds else "-",
            size(one.memory.total),
            *([seconds(raced[one.plan]) if one.plan in raced else "-"] if raced else []),
            shorten(str(one.plan), _LONGEST),
        )
        for one in (*planned.candidates, *alone)
    ]
    return table(headers, rows, headers[1:-1])


def _stages(answer: Explained) -> list[str]:
    headers = ("stage", "begins at", "ranks", "takes the output of", "computes", "waits", "share", "sends", "memory")
    rows = [
        (
            *stage_cells(number, stage),
            seconds(stage.computes_s),
            seconds(stage.waits_s),
            rough_percent(stage.waits_s / (answer.scored.seconds or 1.0)),
            size(stage.sent_bytes),
            size(stage.memory.total),
        )
        for number, stage in enumerate(answer.stages, 1)
    ]
    return table(headers, rows, headers[4:])


def _layers(answer: Explained) -> list[str]:
    mesh, least_s = answer.scored.placement.mesh, _WORTH_A_ROW * answer.scored.seconds
    axes, staged = ",".join(mesh.beside_stages(mesh.names)), bool(answer.stages)
    strategy = f"strategy ({axes})" if axes else "strategy"
    headers = (
        *(["stage"] * staged),
        "layer",
        "work",
        strategy,
        "gives",
        "computes",
        "waits",
        "sends",
        "next best",
        "would cost",
    )
    with_row = [layer for layer in answer.layers if layer.strategy or layer.computes_s + layer.exposed_s >= least_s]
    rows = [
        (
            *([str(layer.stage)] * staged),
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
        computes_s = sum(layer.computes_s for layer in small_layers)
        waits_s, sent = (sum(getattr(layer, key) for layer in small_layers) for key in ("exposed_s", "sent_bytes"))
        name = f"{len(small_layers)} other{'s' * (len(small_layers) > 1)}"
        rows.append((*([""] * staged), name, "", "", "", seconds(computes_s), seconds(waits_s), size(sent), "", ""))
    return table(headers, rows, ("computes", "waits", "sends", "would cost"))


def document(answer: Explained) -> dict[str, Any]:
    """Everything that the explanation says, in seconds and bytes; lists stand in the order of the network."""
    planned, scored = answer.planned, answer.scored
    workload, search = planned.workload, planned.search
    record = {
        "model": workload.name,
        "devices": planned.devices,
        "batch": workload.batch,
        "passes": scored.passes,
        "sample": workload.sample,
        "plan": _plan(scored),
        "shares": planned.shares(scored.plan),
        "pace": planned.costs.slowdowns,
        "update_s": scored.seconds,
        "samples_per_s": answer.samples_per_second,
        "speedup": planned.speedup,
        "efficiency": answer.efficiency,
        "serial_s": planned.serial.seconds,
        "memory": _memory(scored.memory),
        "verdict": asdict(answer.verdict),
        "time": [asdict(part) for part in answer.parts],
        "changes": [asdict(change) for change in answer.changes],
        "candidates": [
            {
                "plan": _plan(one),
                "update_s": one.seconds,
                "measured_s": planned.measured.get(one.plan),
                "speedup": planned.serial.seconds / one.seconds if one.seconds else 1.0,
                "memory": _memory(one.memory),
            }
            for one in planned.candidates
        ],
        "schedule": scored.staging.schedule if scored.staging is not None else None,
        "bubble": scored.bubble,
        "stages": [asdict(stage) | {"memory": _memory(stage.memory)} for stage in answer.stages],
        "layers": [_layer(layer) for layer in answer.layers],
        "exact": search.exact if search is not None else None,
        "notes": answer.notes,
    }
    as_json_has_it: dict[str, Any] = json.loads(json.dumps(record))
    return as_json_has_it


def _plan(scored: Scored) -> dict[str, Any]:
    return {"text": str(scored.plan), **scored.plan.to_dict()}


def _layer(layer: Layer) -> dict[str, Any]:
    record = asdict(layer)
    return {key: value for key, value in record.items() if key != "stage" or value is not None}


def _memory(memory: RankMemory) -> dict[str, int]:
    return {"total": memory.total, **asdict(memory)}


_THREADS = get_args(Stream)
_COLORS = {
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "transfer": "terrible",
    "gradient": "bad",
    "copy": "yellow",
    "update": "good",
    "around": "grey",
}


def trace(**sources: Timeline) -> dict[str, Any]:
    """The trace of one or several steps as JSON has it, by where they come from: `predicted=…, measured=…`. Each rank
    of each is a process, and the processes of a rank stand below each other."""
    events: list[dict[str, Any]] = []
    for number, (source, timeline) in enumerate(sources.items()):
        events += _of_source(source, number, len(sources), timeline.spans)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _of_source(source: str, number: int, count: int, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    present = {(span.task.rank, span.task.stream) for span in spans}
    streams = [stream for stream in _THREADS if any(stream == other for _, other in present)]
    threads = {stream: place for place, stream in enumerate(streams, 1)}

    def named(what: str, rank: int, thread: int, **arguments: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": process_of(rank), "tid": thread, "ts": 0, "args": arguments}

    def process_of(rank: int) -> int:
        return 1 + rank * count + number  # viewers treat process 0 as the kernel's

    for rank in sorted({rank for rank, _ in present}):
        yield named("process_name", rank, 0, name=f"{source} rank {rank}")
        yield named("process_sort_index", rank, 0, sort_index=process_of(rank))
        for stream in streams:
            if (rank, stream) in present:
                yield named("thread_name", rank, threads[stream], name=stream)
                yield named("thread_sort_index", rank, threads[stream], sort_index=threads[stream])
    for span in spans:
        task = span.task
        # in whole nanoseconds, as viewers count, so that events that follow each other do not overlap
        start, end = round(span.start * 1e9), round(span.end * 1e9)
        event = {
            "ph": "X",
            "name": task.name or task.layer or task.kind,
            "cat": task.kind,
            "pid": process_of(task.rank),
            "tid": threads[task.stream],
            "ts": start / 1e3,
            "dur": (end - start) / 1e3,
            "args": {"layer": task.layer, "kind": task.kind} | ({"bytes": task.num_bytes} if task.num_bytes else {}),
        }
        yield event | ({"cname": _COLORS[task.kind]} if task.kind in _COLORS else {})
