"""The planner's pages: why a plan is the fastest, and what machines that are not at hand would do (`--on`)."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_args

from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from convoy import units
from convoy.files import to_json
from convoy.planner.cost.prediction import Scored
from convoy.planner.machines import Prediction
from convoy.planner.planner import Planned
from convoy.planner.text import document
from convoy.planner.verdict import HOST, OTHERS, Explained, parts_of
from convoy.plans.explain import listed, some_ranks
from convoy.plans.mesh import Mesh
from convoy.plans.strategies import STRATEGIES
from convoy.plans.timeline import ENGINE, Span, Stream, Task, Timeline, is_engine
from convoy.report import axes as ax
from convoy.report import pages
from convoy.report.network_drawing import NetworkDrawing, shown_height
from convoy.report.pages import Tile, data_uri
from convoy.units import per_second, rough_percent, seconds, shape, size

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

_VERDICTS = {
    "compute": "compute-bound",
    "communication": "communication-bound",
    "batch": "too small a batch",
    "division": "computing divides badly",
    "repeated": "work is repeated",
    "optimizer": "bound by the optimizer",
    "input": "input-bound",
    "host": "bound by the host",
    "stages": "bound by the stages",
}


def plan_page(answer: Explained, command: str = "") -> str:
    """The page as HTML; `command` is the one that found the plan."""
    styles = ("report.css", "bars.css", "plan.css")
    return pages.render("plan.html.jinja", styles, ("copy.js", "plan.js"), **_content(answer, command))


def _content(answer: Explained, command: str) -> dict[str, Any]:
    planned, scored = answer.planned, answer.scored
    workload, total = planned.workload, scored.seconds or 1.0
    raw = to_json(document(answer), indent=1).encode()
    bars = _bars(planned, scored)
    mesh, drawing = scored.placement.mesh, NetworkDrawing(answer)
    used = {strategy for layer in answer.layers for strategy in mesh.beside_stages(layer.strategy)}
    stages = list(enumerate(answer.stages, 1))
    return {
        "answer": answer,
        "name": "plan",
        "title": workload.name,
        "subject": units.plural(planned.devices, "device"),
        "several": planned.devices > 1,
        "facts": _facts(answer),
        "status": _VERDICTS[answer.verdict.kind],
        "status_kind": "good" if answer.verdict.kind == "compute" else "warn",
        "axes": ", ".join(mesh.beside_stages(mesh.names)),
        "tiles": _tiles(answer),
        "bars": bars,
        "bar_legend": [(key, word) for key, word in _BAR_WORDS.items() if any(key in bar["keys"] for bar in bars)],
        "network": drawing,
        "canvas": shown_height(drawing.tops),
        "network_legend": [
            *([("stage", "1", "the stage")] if stages else []),
            *((name, one.letter, f"{name}: {one.effect}") for name, one in STRATEGIES.items() if name in used),
        ],
        "stages": stages,
        "timeline": timeline_drawing(scored.timeline, mesh),
        "total": total,
        "words": {"colors": PARTS, "ranks": some_ranks, "takes": listed, "strategy": mesh.beside_stages},
        "yaml": scored.plan.to_yaml().rstrip(),
        "command": command,
        "download": data_uri(raw, "application/json"),
        "size": units.prefixed(len(raw), "B"),
    }


def _facts(answer: Explained) -> list[str]:
    workload, scored = answer.planned.workload, answer.scored
    schedule = scored.staging.schedule if scored.staging is not None else ""
    facts = {
        f"{units.count(workload.batch)} samples an update": True,
        f"{scored.passes} passes of {scored.placement.batch.num_samples}": scored.passes > 1,
        f"schedule {schedule}": bool(schedule),
        f"images of {shape(workload.sample)}": True,
        f"microbatches of {workload.microbatch}": bool(workload.microbatch),
        str(workload.precision).removeprefix("torch."): workload.precision is not None,
        "channels last": workload.channels_last,
    }
    return [fact for fact, holds in facts.items() if holds]


def _tiles(answer: Explained) -> list[Tile]:
    planned, scored = answer.planned, answer.scored
    memory = scored.memory
    tiles = [
        Tile("An update", seconds(scored.seconds), "predicted", True),
        Tile("Samples a second", per_second(answer.samples_per_second), "all devices together"),
    ]
    if planned.devices > 1:
        note = f"{rough_percent(answer.efficiency)} efficiency; {seconds(planned.serial.seconds)} on one device"
        tiles.append(Tile("Speed-up", f"{planned.speedup:.2f} ×", note))
    if answer.stages:
        tiles.append(Tile("Bubble", rough_percent(scored.bubble), f"{len(answer.stages)} stages wait for each other"))
    held = f"{size(memory.parameters)} of parameters, {size(memory.activations)} of activations"
    tiles.append(Tile("Memory of a rank", size(memory.total), held))
    return tiles


def _bars(planned: Planned, chosen: Scored) -> list[dict[str, Any]]:
    """The plans beside each other: their parts as color, share of the longest plan, and text."""
    bars = []
    shown = [*planned.candidates, *([planned.serial] if planned.devices > 1 else [])]
    longest = max(scored.seconds for scored in shown) or 1.0
    for one in shown:
        parts = [part for part in parts_of(planned, one) if part.seconds > 0]
        speedup = planned.serial.seconds / one.seconds if one.seconds else 1.0
        bars.append(
            {
                "name": "one device" if one is planned.serial else str(one.plan),
                "chosen": one is chosen,
                "keys": {PARTS[part.part] for part in parts},
                "parts": [
                    (PARTS[part.part], 100 * part.seconds / longest, f"{part.part}: {seconds(part.seconds)}")
                    for part in parts
                ],
                "time": seconds(one.seconds),
                "speedup": f"{speedup:.2f} ×",
                "memory": size(one.memory.total),
            }
        )
    return bars


_BAR_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "around": "input and loss",
    "packing": "packing",
    "transfer": "waiting for messages",
    "update": "optimizer",
    "engine": KINDS["engine"],
    "idle": "idle, or waiting for other stages",
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
        rows=[(one, one.row(images, prices[number] if prices else None)) for number, one in enumerate(predictions)],
        picture=Markup(_picture(predictions)),
        command=command,
    )


def _picture(predictions: Sequence[Prediction]) -> str:
    with ax.house_style():
        figure = ax.new_figure()
        axes = ax.add_axes(figure, "Images a second by data parallelism", "devices")
        for number, one in enumerate(predictions):
            color = _COLORS[number % len(_COLORS)]
            counts = [count for count, _ in one.curve]
            rates = [rate for _, rate in one.curve]
            axes.fill_between(
                counts, [r / one.within for r in rates], [r * one.within for r in rates], color=color, alpha=0.18, lw=0
            )
            axes.plot(counts, rates, color=color, label=one.machine.label, marker="o", markersize=3.4)
            # from here on twice as many devices are less than 1.7 times as fast
            bend = next((at for at, (_, more) in pairwise(one.curve) if more < 1.7 * at[1]), None)
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
