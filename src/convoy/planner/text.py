"""The explanation of a plan as text for a terminal; predicted and measured updates as traces."""

from collections.abc import Iterable, Iterator, Sequence

from convoy.planner.explanation import Explanation
from convoy.planner.planner import passes_of
from convoy.plans.place import COMPUTE
from convoy.plans.traffic import stage_cells
from convoy.units import extra, per_second, plural, rough_percent, seconds, shape, shorten, size, table

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
