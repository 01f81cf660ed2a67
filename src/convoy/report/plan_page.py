"""The planner's pages: why a plan is the fastest, and what machines that are not at hand would do (`--on`)."""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_args

from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from convoy import units
from convoy.files import to_json
from convoy.planner.explanation import Explanation
from convoy.planner.layers import PARTS, parts_of
from convoy.planner.machines import Prediction
from convoy.plans.mesh import Mesh
from convoy.plans.plan import STRATEGIES
from convoy.plans.timeline import ENGINE, Span, Stream, Task, Timeline
from convoy.plans.traffic import listed, some_ranks
from convoy.report import axes as ax
from convoy.report import pages
from convoy.report.network_drawing import NetworkDrawing
from convoy.report.pages import Tile, data_uri
from convoy.units import seconds, shape, size

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
# What parts of an update have the color of another kind of work than the timeline's kind of that name
_COLOR = {"input": "around", "copy": "packing", "exposed": "transfer", "issuing": "idle"}


def plan_page(answer: Explanation, command: str = "") -> str:
    """The page as HTML; `command` is the one that found the plan."""
    planned, scored = answer.planned, answer.scored
    workload, mesh = planned.workload, scored.placement.mesh
    raw = to_json(answer.document(), indent=1).encode()
    plans = [*planned.candidates, *([planned.serial] if planned.devices > 1 else [])]
    used = {strategy for layer in answer.layers for strategy in mesh.beside_stages(layer.strategy)}
    facts = [
        f"{units.count(workload.batch)} samples an update",
        f"{scored.passes} passes of {scored.placement.batch.num_samples}" if scored.passes > 1 else "",
        f"schedule {scored.staging.schedule}" if scored.staging is not None else "",
        f"images of {shape(workload.sample)}",
        f"microbatches of {workload.microbatch}" if workload.microbatch else "",
        str(workload.precision).removeprefix("torch.") if workload.precision is not None else "",
        "channels last" if workload.channels_last else "",
    ]
    return pages.render(
        "plan.html.jinja",
        ("report.css", "bars.css", "plan.css"),
        ("copy.js", "plan.js"),
        answer=answer,
        planned=planned,
        tile=Tile,
        scored=scored,
        name="plan",
        title=workload.name,
        subject=units.plural(planned.devices, "device"),
        several=planned.devices > 1,
        facts=filter(None, facts),
        # the first words of the sentence, but for what it says of this network: `compute-bound`
        status=re.split(":| in | per |;", answer.verdict.sentence)[0].lower(),
        status_kind="good" if answer.verdict.kind == "compute" else "warn",
        axes=", ".join(mesh.beside_stages(mesh.names)),
        bars=[(plan, [part for part in parts_of(planned, plan) if part.seconds > 0]) for plan in plans],
        longest=max(plan.seconds for plan in plans) or 1.0,
        colors={part: _COLOR.get(kind, kind) for part, kind in PARTS.items()},
        network=NetworkDrawing(answer),
        strategies={name: strategy for name, strategy in STRATEGIES.items() if name in used},
        timeline=timeline_drawing(scored.timeline, mesh),
        total=scored.seconds or 1.0,
        words={"ranks": some_ranks, "takes": listed, "strategy": mesh.beside_stages, "rate": units.per_second},
        yaml=scored.plan.to_yaml().rstrip(),
        command=command,
        download=data_uri(raw, "application/json"),
        size=units.prefixed(len(raw), "B"),
    )


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
        "marks": _marks(total),
        "kinds": [(kind, word) for kind, word in KINDS.items() if kind in present],
        "left_out": max(0, len(timeline.ranks) - MOST_RANKS),
    }


def _marks(total: float) -> list[tuple[str, str, str]]:
    """Four to eight round times from 0 to `total`: place in percent, anchor, text without needless zeros (`2 ms`)."""
    step = 10.0 ** math.floor(math.log10(total / 4))
    step *= next((factor for factor in (1, 2, 5, 10) if total / (step * factor) <= 8), 10)
    marks = []
    for number in (count * step for count in range(int(total / step + 1e-9) + 1)):
        place, (figure, _, unit) = 100 * number / total, seconds(number).partition(" ")
        text = f"{figure.rstrip('0').rstrip('.') if '.' in figure else figure} {unit}" if number else "0"
        marks.append((f"{place:.2f}", "start" if place < 2 else "end" if place > 95 else "middle", text))
    return marks


def _drawn(spans: Sequence[Span], total: float) -> list[tuple[str, str, str, str]]:
    """Kind, place, width in percent, and title of what is drawn; thin spans of a kind next to each other as one."""
    merged: list[tuple[str, float, float, list[str]]] = []
    for span in spans:
        start, end, kind = span.start, span.end, _kind(span.task)
        if end <= start:
            continue
        last_kind, began, ended, titles = merged[-1] if merged else ("", 0.0, 0.0, list[str]())
        if last_kind == kind and start - ended < 1e-4 * total and end - start < _THIN * total:
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
    if (task.kind, task.name) == ("around", ENGINE):
        return "engine"
    return "packing" if task.kind == "copy" else task.kind


def _title(span: Span) -> str:
    task, word = span.task, KINDS[_kind(span.task)]
    about = f", {size(task.num_bytes)}" if task.num_bytes else ""
    name = task.name or task.layer or word
    where = f" for {task.layer}" if task.layer and task.stream != "compute" and task.layer != name else ""
    return f"{name}{where}: {f'{word}, ' if word != name else ''}{seconds(span.end - span.start)}{about}"


_COLORS = (ax.TRAIN, ax.TEST, ax.GREEN, ax.PURPLE, ax.OCHRE)


def machines_page(
    network: str, predictions: Sequence[Prediction], images: float, prices: Sequence[float], what: str, command: str
) -> str:
    """The page as HTML. `images` are those of the whole training, `what` is that in words; `prices` are of an hour of
    one device of each machine, or empty."""
    first = predictions[0]
    return pages.render(
        "machines.html.jinja",
        ("report.css", "plan.css"),
        ("copy.js",),
        name="plan",
        title=network,
        subject=first.machine.text,
        facts=[f"batch {first.batch}", what],
        status="predicted, not measured",
        status_kind="warn",
        rows=[(row, row.row(images, prices[number] if prices else None)) for number, row in enumerate(predictions)],
        picture=Markup(_picture(predictions)),
        command=command,
    )


def _picture(predictions: Sequence[Prediction]) -> str:
    with ax.house_style():
        figure = ax.new_figure()
        axes = ax.add_axes(figure, "Images a second by data parallelism", "devices")
        for number, row in enumerate(predictions):
            color = _COLORS[number % len(_COLORS)]
            counts = [count for count, _ in row.curve]
            rates = [rate for _, rate in row.curve]
            axes.fill_between(
                counts, [r / row.within for r in rates], [r * row.within for r in rates], color=color, alpha=0.18, lw=0
            )
            axes.plot(counts, rates, color=color, label=row.machine.label, marker="o", markersize=3.4)
            # from here on twice as many devices are less than 1.7 times as fast
            bend = next((at for at, (_, more) in pairwise(row.curve) if more < 1.7 * at[1]), None)
            if bend is not None:
                axes.plot(*([number] for number in bend), color=color, marker="D", markersize=7, fillstyle="none")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.6g}"))
            axis.set_minor_locator(NullLocator())
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=min(3, len(predictions)), **ax.LEGEND)
    described = "Each line is a machine, the band is where nine in ten published values lie around such predictions."
    return pages.inline_svg(figure, "curve", "Images a second over devices", described)
