"""The explanation of a plan as text for a terminal and as JSON has it; predicted and measured updates as traces."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, get_args

from convoy.planner.cost.prediction import Scored
from convoy.planner.layers import Layer, Stage
from convoy.planner.planner import Planned, passes_of
from convoy.planner.verdict import Explained
from convoy.plans.explain import listed, some_ranks
from convoy.plans.mesh import Mesh
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
        _passes(planned, scored) if scored.staging is not None else "",
        verdict.sentence,
        verdict.advice,
    ]
    changes = [(change.text, f"{change.gain:.2f} ×", seconds(change.seconds)) for change in answer.changes]
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
    """How the batch goes through the stages, and whether `convoy train` does so where the plan is given."""
    staging, plan = scored.staging, scored.plan
    assert staging is not None
    best = f"{plural(scored.passes, 'pass', 'passes')}, schedule {staging.schedule}"
    usual = passes_of(planned.workload, plan) or 1
    requested = f"{plural(usual, 'pass', 'passes')}, schedule {planned.workload.default_schedule}"
    if best == requested:
        return f"in {best}"
    return f"in {best}, as convoy train runs it with --plan auto; given as a plan, it runs in {requested}"


def _figures(answer: Explained) -> Iterator[str]:
    planned, scored = answer.planned, answer.scored
    memory = scored.memory
    held = [
        (memory.parameters, "parameters"),
        (memory.gradients, "gradients"),
        (memory.optimizer, "optimizer"),
        (memory.activations, "activations"),
        (memory.buffers, "buffers"),
        (memory.messages, "messages"),
        (memory.workspace, "workspace"),
    ]
    raced_s = planned.measured.get(scored.plan)
    race = f" ({seconds(raced_s)} in a race of plans)" if raced_s is not None else ""
    rows = [("update", f"{seconds(scored.seconds)}, {per_second(answer.samples_per_second)} samples/s{race}")]
    if planned.devices > 1:
        alone = f"{seconds(planned.serial.seconds)} on one device"
        rows.append(("speed-up", f"{answer.speedup:.2f} × ({alone}), efficiency {rough_percent(answer.efficiency)}"))
    if answer.stages:
        rows.append(("bubble", f"{rough_percent(scored.bubble)} of the devices' time, waiting for other stages"))
    parts = ", ".join(f"{name} {size(number)}" for number, name in held if number)
    rows.append(("memory", f"{size(memory.total)} on the rank that needs most: {parts}"))
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        yield f"{name.ljust(width)}  {text}"


def _parts(answer: Explained) -> Iterator[str]:
    total = answer.scored.seconds or 1.0
    rows = [
        (part.name, seconds(part.seconds), rough_percent(part.seconds / total), seconds(part.ideal))
        for part in answer.parts
    ]
    if answer.planned.devices == 1:
        yield from table(("time", "seconds", "of the update"), [row[:3] for row in rows], ("seconds", "of the update"))
        return
    headers = ("time", "seconds", "of the update", "even share of one device's")
    yield from table(headers, rows, headers[1:])


def _candidates(answer: Explained) -> Iterator[str]:
    planned = answer.planned
    shown = list(planned.candidates)
    rows = [_candidate(planned, one, one is answer.scored) for one in shown]
    if not any(one.placement.mesh.num_devices == 1 for one in shown):
        rows.append(_candidate(planned, planned.serial, False))
    headers = ("", "update", "speed-up", "memory", *(["measured"] if planned.measured else []), "plan")
    yield from table(headers, rows, headers[1:-1])


def _candidate(planned: Planned, one: Scored, chosen: bool) -> tuple[str, ...]:
    gain = f"{planned.serial.seconds / one.seconds:.2f} ×" if one.seconds else "-"
    raced_s = planned.measured.get(one.plan)
    measured = [seconds(raced_s) if raced_s is not None else "-"] if planned.measured else []
    short = shorten(str(one.plan), _LONGEST)
    return ("→" if chosen else " ", seconds(one.seconds), gain, size(one.memory.total), *measured, short)


def _stages(answer: Explained) -> Iterator[str]:
    headers = ("stage", "begins at", "ranks", "takes the output of", "computes", "waits", "share", "sends", "memory")
    total = answer.scored.seconds or 1.0
    rows = [
        (
            str(number),
            stage.layer or "-",
            some_ranks(stage.ranks),
            listed(stage.takes) or "-",
            seconds(stage.computes),
            seconds(stage.waits),
            rough_percent(stage.waits / total),
            size(stage.sent),
            size(stage.memory.total),
        )
        for number, stage in enumerate(answer.stages, 1)
    ]
    yield from table(headers, rows, headers[4:])


def _layers(answer: Explained) -> Iterator[str]:
    mesh = answer.scored.placement.mesh
    axes = ",".join(mesh.beside_stages(mesh.names))
    headers: tuple[str, ...] = (
        "layer",
        "work",
        f"strategy ({axes})" if axes else "strategy",
        "gives",
        "computes",
        "waits",
        "sends",
        "next best",
        "would cost",
    )
    right = ("computes", "waits", "sends", "would cost")
    rows, small = [], []
    for layer in answer.layers:
        if layer.strategy or layer.seconds >= _WORTH_A_ROW * answer.scored.seconds:
            rows.append(_row(layer, mesh))
        else:
            small.append(layer)
    if small:
        rest = sum(layer.forward + layer.backward + layer.copies for layer in small)
        waits = seconds(sum(layer.exposed for layer in small))
        name = "1 other" if len(small) == 1 else f"{len(small)} others"
        rows.append((name, "", "", "", seconds(rest), waits, size(sum(layer.sent for layer in small)), "", ""))
    if answer.stages:
        headers, stages = ("stage", *headers), {layer.name or "-": layer.stage for layer in answer.layers}
        rows = [(_numbered(stages.get(row[0])), *row) for row in rows]
    yield from table(headers, rows, right)


def _row(layer: Layer, mesh: Mesh) -> tuple[str, ...]:
    work = next((op for op in layer.ops if op in COMPUTE), layer.ops[0] if layer.ops else "")
    other = layer.other
    return (
        layer.name or "-",
        work,
        ",".join(mesh.beside_stages(layer.strategy)) or "-",
        shape(layer.gives),
        seconds(layer.forward + layer.backward + layer.copies),
        seconds(layer.exposed),
        size(layer.sent),
        ",".join(mesh.beside_stages(other.strategy)) if other is not None else "-",
        extra(other.seconds) if other is not None else "-",
    )


def _numbered(stage: int | None) -> str:
    return "" if stage is None else str(stage + 1)


def document(answer: Explained) -> dict[str, Any]:
    """Everything that the explanation says, in seconds and bytes; lists stand in the order of the network."""
    planned, scored = answer.planned, answer.scored
    workload, search = planned.workload, planned.search
    return {
        "model": workload.name,
        "devices": planned.devices,
        "batch": workload.batch,
        "passes": scored.passes,
        "sample": list(workload.sample),
        "plan": _plan(scored),
        "shares": planned.shares(scored.plan),
        "pace": list(planned.costs.slowdowns),
        "update_s": scored.seconds,
        "samples_per_s": answer.samples_per_second,
        "speedup": answer.speedup,
        "efficiency": answer.efficiency,
        "serial_s": planned.serial.seconds,
        "memory": _memory(scored),
        "verdict": {
            "kind": answer.verdict.kind,
            "layer": answer.verdict.layer,
            "sentence": answer.verdict.sentence,
            "advice": answer.verdict.advice,
        },
        "time": [{"part": part.name, "seconds": part.seconds, "even_share_s": part.ideal} for part in answer.parts],
        "changes": [
            {"kind": change.kind, "change": change.text, "gain": change.gain, "update_s": change.seconds}
            for change in answer.changes
        ],
        "candidates": [
            {
                "plan": _plan(one),
                "update_s": one.seconds,
                "measured_s": planned.measured.get(one.plan),
                "speedup": planned.serial.seconds / one.seconds if one.seconds else 1.0,
                "memory": _memory(one),
            }
            for one in planned.candidates
        ],
        "schedule": scored.staging.schedule if scored.staging is not None else None,
        "bubble": scored.bubble,
        "stages": [_stage_document(stage) for stage in answer.stages],
        "layers": [_layer_document(layer) for layer in answer.layers],
        "exact": search.exact if search is not None else None,
        "notes": list(answer.notes),
    }


def _plan(scored: Scored) -> dict[str, Any]:
    return {"text": str(scored.plan), **scored.plan.to_dict()}


def _memory(scored: Scored) -> dict[str, int]:
    return {"total": scored.memory.total, **asdict(scored.memory)}


def _stage_document(stage: Stage) -> dict[str, Any]:
    return {
        "begins": stage.layer,
        "ranks": list(stage.ranks),
        "takes": list(stage.takes),
        "received_bytes": {"forward": stage.received.forward, "backward": stage.received.backward},
        "computes_s": stage.computes,
        "waits_s": stage.waits,
        "sent_bytes": stage.sent,
        "memory": {"total": stage.memory.total, **asdict(stage.memory)},
    }


def _layer_document(layer: Layer) -> dict[str, Any]:
    other = layer.other
    return {
        "layer": layer.name,
        **({} if layer.stage is None else {"stage": layer.stage + 1}),
        "ops": list(layer.ops),
        "strategy": list(layer.strategy),
        "takes": list(layer.takes),
        "gives": list(layer.gives),
        "forward_s": layer.forward,
        "backward_s": layer.backward,
        "copies_s": layer.copies,
        "exposed_s": layer.exposed,
        "messages_s": layer.messages,
        "sent_bytes": layer.sent,
        "parameter_bytes": layer.parameters,
        "next_best": {"strategy": list(other.strategy), "extra_s": other.seconds} if other is not None else None,
    }


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
    streams = sorted({span.task.stream for span in spans}, key=lambda name: (*_place(name), name))
    threads = {stream: place for place, stream in enumerate(streams, 1)}

    def process_of(rank: int) -> int:
        return 1 + rank * count + number  # viewers treat process 0 as the kernel's

    for rank in sorted({span.task.rank for span in spans}):
        process = process_of(rank)
        yield _named("process_name", process, 0, name=f"{source} rank {rank}")
        yield _named("process_sort_index", process, 0, sort_index=process)
        for stream in sorted({span.task.stream for span in spans if span.task.rank == rank}, key=threads.__getitem__):
            yield _named("thread_name", process, threads[stream], name=stream)
            yield _named("thread_sort_index", process, threads[stream], sort_index=threads[stream])
    for span in spans:
        task = span.task
        # in whole nanoseconds, as viewers count, so that events that follow each other do not overlap
        start, end = round(span.start * 1e9), round(span.end * 1e9)
        arguments: dict[str, Any] = {"layer": task.layer, "kind": task.kind}
        if task.num_bytes:
            arguments["bytes"] = task.num_bytes
        event = {
            "ph": "X",
            "name": task.name or task.layer or task.kind,
            "cat": task.kind,
            "pid": process_of(task.rank),
            "tid": threads[task.stream],
            "ts": start / 1e3,
            "dur": (end - start) / 1e3,
            "args": arguments,
        }
        if task.kind in _COLORS:
            event["cname"] = _COLORS[task.kind]
        yield event


def _named(what: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": arguments}


def _place(stream: str) -> tuple[int]:
    return (_THREADS.index(stream) if stream in _THREADS else len(_THREADS),)
