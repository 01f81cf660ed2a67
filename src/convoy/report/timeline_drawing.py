"""The predicted timeline of an update, as wide as the page, for `plan.html.jinja`, and the colors of kinds of work."""

import math
from collections.abc import Sequence
from typing import Any, get_args

from convoy.planner.verdict import HOST, OTHERS
from convoy.plans.mesh import Mesh
from convoy.plans.timeline import ENGINE, Span, Stream, Task, Timeline, is_engine
from convoy.units import seconds, size

# The kinds of work, by their names in the style sheet, which has their colors.
KINDS = {
    "around": "input and loss",
    "forward": "forward",
    "backward": "backward",
    "packing": "packing for messages",
    "update": "optimizer",
    "engine": f"{ENGINE}, once in an update",
    "transfer": "messages between layers",
    "gradient": "gradients",
}

# The colors of the parts of an update's time.
PARTS = {
    "input": "around",
    "forward": "forward",
    "loss and the rest of a pass": "around",
    "backward": "backward",
    "packing for messages": "packing",
    "exposed communication": "transfer",
    "optimizer": "update",
    ENGINE: "engine",
    "idle": "idle",
    HOST: "idle",
    OTHERS: "idle",
}


MOST_RANKS = 4
_THIN = 0.0008  # part of the whole below which neighbors of a kind are drawn as one


def timeline_drawing(timeline: Timeline, mesh: Mesh) -> dict[str, Any]:
    """For each rank that there is room for, its heading and the spans of its streams; the marks of the axis; the kinds
    of work with their words; and how many ranks are left out."""
    total, of_rank = timeline.total or 1.0, {}
    other_ranks = [rank for rank in timeline.ranks if rank != timeline.busiest]
    for rank in sorted([timeline.busiest, *other_ranks[: MOST_RANKS - 1]]) if timeline.ranks else ():
        stage = f", stage {mesh.stage_of(rank) + 1}" if mesh.stage_axis is not None else ""
        spans = [span for span in timeline.spans if span.task.rank == rank]
        streams = {stream: [span for span in spans if span.task.stream == stream] for stream in get_args(Stream)}
        of_rank[rank] = stage, [(stream, _drawn(spans, total)) for stream, spans in streams.items() if spans]
    present = {_kind(span.task) for span in timeline.spans}
    return {
        "ranks": of_rank,
        "marks": [_mark(number, total) for number in ticks(total)],
        "kinds": [(kind, word) for kind, word in KINDS.items() if kind in present],
        "left_out": max(0, len(timeline.ranks) - MOST_RANKS),
    }


def ticks(total: float) -> list[float]:
    """Round times from 0 to `total`, four to eight of them."""
    step = 10.0 ** math.floor(math.log10(total / 4)) if total > 0 else 1.0
    step *= next((factor for factor in (1, 2, 5, 10) if total / (step * factor) <= 8), 10)
    return [number * step for number in range(int(total / step + 1e-9) + 1)]


def _mark(number: float, total: float) -> tuple[str, str, str]:
    place = 100 * number / total
    return f"{place:.2f}", "start" if place < 2 else "end" if place > 95 else "middle", short(number) if number else "0"


def _drawn(spans: Sequence[Span], total: float) -> list[tuple[str, str, str, str]]:
    """Kind, place, width in percent, and title of what is drawn; thin spans of a kind next to each other as one."""
    merged: list[tuple[str, float, float, list[str]]] = []
    for span in spans:
        start, end, kind = span.start, span.end, _kind(span.task)
        if end <= start:
            continue
        before, began, ended, titles = merged[-1] if merged else ("", 0.0, 0.0, list[str]())
        if before == kind and start - ended < 1e-4 * total and end - start < _THIN * total:
            merged[-1] = kind, began, end, [*titles, _title(span)]
        else:
            merged.append((kind, start, end, [_title(span)]))
    return [
        (
            kind,
            f"{100 * start / total:.3f}",
            f"{100 * (end - start) / total:.3f}",
            "\n".join([*titles[:12], *([f"and {len(titles) - 12} more"] if len(titles) > 12 else [])]),
        )
        for kind, start, end, titles in merged
    ]


def _kind(task: Task) -> str:
    return "engine" if is_engine(task) else {"copy": "packing"}.get(task.kind, task.kind)


def _title(span: Span) -> str:
    task = span.task
    about = f", {size(task.num_bytes)}" if task.num_bytes else ""
    word = KINDS[_kind(task)]
    name = task.name or task.layer or word
    where = f" for {task.layer}" if task.layer and task.stream != "compute" and task.layer != name else ""
    work = f"{word}, " if word != name else ""
    return f"{name}{where}: {work}{seconds(span.end - span.start)}{about}"


def short(number: float) -> str:
    """A time without needless zeros: `2 ms`."""
    figure, _, unit = seconds(number).partition(" ")
    return f"{figure.rstrip('0').rstrip('.') if '.' in figure else figure} {unit}"
