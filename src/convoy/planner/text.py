"""The explanation of a plan for a terminal."""

from collections.abc import Iterator

from convoy.planner.layers import Layer
from convoy.planner.planner import Scored
from convoy.planner.verdict import Explained
from convoy.planner.words import extra, per_second, percent, seconds, shape, shortened
from convoy.plans.explain import size, table
from convoy.plans.place import COMPUTE

_LONGEST = 90
"""Characters of a plan in the table of candidates."""
_WORTH_A_ROW = 0.02
"""Part of an update from which on a layer without a strategy has a row."""


def explanation_text(found: Explained) -> str:
    """Verdict, figures, time, candidates and layers, as aligned tables."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Explained) -> Iterator[str]:
    planned, scored = found.planned, found.scored
    workload = planned.workload
    batch = workload.samples * workload.passes
    passes = f" in {workload.passes} passes of {workload.samples}" if workload.passes > 1 else ""
    devices = "1 device" if planned.devices == 1 else f"{planned.devices} devices"
    yield f"{workload.name} on {devices}, {batch} samples an update{passes}, images of {shape(workload.sample)}"
    yield ""
    yield f"plan {scored.plan}"
    shares = planned.shares(scored.plan)
    if shares is not None:
        yield f"with --shares {','.join(map(str, shares))}"
    yield found.verdict.sentence
    if found.verdict.advice:
        yield found.verdict.advice
    yield ""
    yield from _figures(found)
    yield ""
    yield from _parts(found)
    if found.changes:
        yield ""
        rows = [(change.text, f"{change.gain:.2f} ×", seconds(change.seconds)) for change in found.changes]
        yield from table(("what if", "samples/s", "update"), rows, ("samples/s", "update"))
    if len(planned.candidates) > 1 or planned.devices > 1:
        yield ""
        yield from _candidates(found)
    if planned.devices > 1:
        yield ""
        yield from _layers(found)
    if found.notes:
        yield ""
        yield from found.notes


def _figures(found: Explained) -> Iterator[str]:
    planned, scored = found.planned, found.scored
    memory = scored.memory
    held = [
        (memory.parameters, "parameters"),
        (memory.gradients, "gradients"),
        (memory.optimizer, "optimizer"),
        (memory.activations, "activations"),
        (memory.buffers, "buffers"),
        (memory.messages, "messages"),
    ]
    rows = [("update", f"{seconds(scored.seconds)}, {per_second(found.samples_per_second)} samples/s")]
    if planned.devices > 1:
        alone = f"{seconds(planned.serial.seconds)} on one device"
        rows.append(("speed-up", f"{found.speedup:.2f} × ({alone}), efficiency {percent(found.efficiency)}"))
    parts = ", ".join(f"{name} {size(number)}" for number, name in held if number)
    rows.append(("memory", f"{size(memory.total)} on the rank that needs most: {parts}"))
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        yield f"{name.ljust(width)}  {text}"


def _parts(found: Explained) -> Iterator[str]:
    total = found.scored.seconds or 1.0
    rows = [
        (part.name, seconds(part.seconds), percent(part.seconds / total), seconds(part.ideal)) for part in found.parts
    ]
    if found.planned.devices == 1:
        yield from table(("time", "seconds", "share"), [row[:3] for row in rows], ("seconds", "share"))
        return
    headers = ("time", "seconds", "share", "even share of one device's")
    yield from table(headers, rows, headers[1:])


def _candidates(found: Explained) -> Iterator[str]:
    planned = found.planned
    shown = list(planned.candidates)
    rows = [_candidate(one, planned.serial.seconds, one is found.scored) for one in shown]
    if not any(one.placement.mesh.num_devices == 1 for one in shown):
        rows.append(_candidate(planned.serial, planned.serial.seconds, False))
    headers = ("", "update", "speed-up", "memory", "plan")
    yield from table(headers, rows, headers[1:4])


def _candidate(one: Scored, serial: float, chosen: bool) -> tuple[str, ...]:
    gain = f"{serial / one.seconds:.2f} ×" if one.seconds else "-"
    short = shortened(str(one.plan), _LONGEST)
    return ("→" if chosen else " ", seconds(one.seconds), gain, size(one.memory.total), short)


def _layers(found: Explained) -> Iterator[str]:
    names = ",".join(found.scored.placement.mesh.names)
    headers = (
        "layer",
        "work",
        f"strategy ({names})",
        "gives",
        "computes",
        "waits",
        "sends",
        "next best",
        "would cost",
    )
    right = ("computes", "waits", "sends", "would cost")
    rows, others = [], []
    for layer in found.layers:
        if layer.strategy or layer.seconds >= _WORTH_A_ROW * found.scored.seconds:
            rows.append(_row(layer))
        else:
            others.append(layer)
    if others:
        rest = sum(layer.forward + layer.backward + layer.copies for layer in others)
        waits = seconds(sum(layer.exposed for layer in others))
        name = "1 other" if len(others) == 1 else f"{len(others)} others"
        rows.append((name, "", "", "", seconds(rest), waits, size(sum(layer.sent for layer in others)), "", ""))
    yield from table(headers, rows, right)


def _row(layer: Layer) -> tuple[str, ...]:
    work = next((op for op in layer.ops if op in COMPUTE), layer.ops[0] if layer.ops else "")
    other = layer.other
    return (
        layer.name or "-",
        work,
        ",".join(layer.strategy) or "-",
        shape(layer.gives),
        seconds(layer.forward + layer.backward + layer.copies),
        seconds(layer.exposed),
        size(layer.sent),
        ",".join(other.strategy) if other is not None else "-",
        extra(other.seconds) if other is not None else "-",
    )
