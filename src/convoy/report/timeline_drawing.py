"""The predicted timeline of an update, as wide as the page, and the colors of kinds of work."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from markupsafe import Markup

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
_BAND, _AXIS = 24, 22
_THIN = 0.0008  # part of the whole below which neighbors of a kind are drawn as one


@dataclass(frozen=True)
class _Drawn:
    """Spans of a kind next to each other, drawn as one."""

    kind: str
    start: float
    end: float
    titles: tuple[str, ...]


def draw_timeline(timeline: Timeline, mesh: Mesh | None = None) -> Markup:
    """Rows of a grid for an update: a heading for each rank, with its stage in the `mesh`, and for each of its streams
    a name and an `<svg>`."""
    total = timeline.total or 1.0
    parts: list[Markup] = []
    other_ranks = [rank for rank in timeline.ranks if rank != timeline.busiest]
    for rank in sorted([timeline.busiest, *other_ranks[: MOST_RANKS - 1]]) if timeline.ranks else ():
        rank_spans = [span for span in timeline.spans if span.task.rank == rank]
        stage = f", stage {mesh.stage_of(rank) + 1}" if mesh is not None and mesh.stage_axis is not None else ""
        parts.append(Markup("<h3>rank {}{}</h3>").format(rank, stage))
        for stream in get_args(Stream):
            spans = [span for span in rank_spans if span.task.stream == stream]
            if not spans:
                continue
            drawn = Markup("").join(_rect(one, total) for one in _merged(spans, total))
            parts.append(
                Markup(
                    '<span class="stream">{0}</span><svg role="img" width="100%" height="{1}" '
                    'aria-label="rank {2}, {0}"><rect class="band" width="100%" height="{1}"/>{3}</svg>'
                ).format(stream, _BAND, rank, drawn)
            )
    marks = Markup("").join(_tick(number, value, total) for number, value in enumerate(ticks(total)))
    axis = Markup('<svg class="axis" width="100%" height="{}" aria-hidden="true">{}</svg>').format(_AXIS, marks)
    return Markup('<div class="timeline">{}{}</div>').format(Markup("").join(parts), axis)


def kinds_in(timeline: Timeline) -> list[tuple[str, str]]:
    """Key and word of every kind of work in it."""
    present = {_kind(span.task) for span in timeline.spans}
    return [(kind, word) for kind, word in KINDS.items() if kind in present]


def num_left_out(timeline: Timeline) -> int:
    """Ranks for which there is no room."""
    return max(0, len(timeline.ranks) - MOST_RANKS)


def ticks(total: float) -> list[float]:
    """Round times from 0 to `total`, four to eight of them."""
    step = 10.0 ** math.floor(math.log10(total / 4)) if total > 0 else 1.0
    step *= next((factor for factor in (1, 2, 5, 10) if total / (step * factor) <= 8), 10)
    return [number * step for number in range(int(total / step + 1e-9) + 1)]


def _merged(spans: Sequence[Span], total: float) -> list[_Drawn]:
    merged: list[_Drawn] = []
    for span in spans:
        start, end, kind = span.start, span.end, _kind(span.task)
        if end <= start:
            continue
        last = merged[-1] if merged else None
        thin = end - start < _THIN * total
        if last is not None and last.kind == kind and start - last.end < 1e-4 * total and thin:
            merged[-1] = _Drawn(kind, last.start, end, (*last.titles, _title(span)))
        else:
            merged.append(_Drawn(kind, start, end, (_title(span),)))
    return merged


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


def _rect(drawn: _Drawn, total: float) -> Markup:
    title = "\n".join(drawn.titles[:12]) + (f"\nand {len(drawn.titles) - 12} more" if len(drawn.titles) > 12 else "")
    return Markup('<rect class="span {}" x="{:.3f}%" width="{:.3f}%" height="{}"><title>{}</title></rect>').format(
        drawn.kind, 100 * drawn.start / total, 100 * (drawn.end - drawn.start) / total, _BAND, title
    )


def _tick(number: int, value: float, total: float) -> Markup:
    """A mark on the axis; every second one steps back where there is little room."""
    place = 100 * value / total
    anchor = "start" if place < 2 else "end" if place > 95 else "middle"
    return Markup(
        '<g class="{0}"><line class="tick" x1="{1:.2f}%" x2="{1:.2f}%" y1="0" y2="5"/>'
        '<text class="time" x="{1:.2f}%" y="18" text-anchor="{2}">{3}</text></g>'
    ).format("odd" if number % 2 else "even", place, anchor, short(value) if value else "0")


def short(number: float) -> str:
    """A time without needless zeros: `2 ms`."""
    figure, _, unit = seconds(number).partition(" ")
    return f"{figure.rstrip('0').rstrip('.') if '.' in figure else figure} {unit}"
