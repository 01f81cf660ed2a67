"""The planner's pages: why a plan is the fastest, with its timeline and its network drawn layer by layer, and what
machines that are not at hand would do (`--on`)."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, get_args

from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from convoy import units
from convoy.files import to_json
from convoy.graph.graph import Call, Graph
from convoy.ops import OPERATIONS
from convoy.planner.explanation import Explanation
from convoy.planner.layers import PARTS, Layer, busiest_ranks, parts_of, stages_of_calls
from convoy.planner.machines import Prediction
from convoy.planner.search.prices import is_choosing
from convoy.plans.mesh import Mesh
from convoy.plans.plan import STRATEGIES
from convoy.plans.timeline import ENGINE, Span, Stream, Task, Timeline
from convoy.plans.traffic import listed, some_ranks
from convoy.report import axes as ax
from convoy.report import pages
from convoy.report.pages import Download, Drawing, Tile, drawn
from convoy.units import extra, seconds, shape, size

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
        download=Download.of("plan.json", to_json(answer.document(), indent=1).encode()),
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
    marks, times = [], MaxNLocator(8, steps=(1, 2, 5, 10)).tick_values(0, total)
    for number in (time for time in times if time <= (1 + 1e-9) * total):
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


def machines_page(
    network: str, predictions: Sequence[Prediction], images: float, prices: Sequence[float], what: str, command: str
) -> str:
    """The page as HTML. `images` are those of the whole training, `what` is that in words; `prices` are of an hour of
    one device of each machine, or empty."""
    first = predictions[0]
    rows = [(row, row.row(images, prices[number] if prices else None)) for number, row in enumerate(predictions)]
    heads = {name: name.capitalize() for name in rows[0][1]}
    if prices:
        heads["price"] = Markup('<span title="in the currency of --price">Price</span>')
    machine, precision, *numbers = heads.values()
    return pages.render(
        "machines.html.jinja",
        ("report.css", "bench.css"),
        ("copy.js",),
        name="plan",
        title=network,
        subject=first.machine.text,
        facts=[f"batch {first.batch}", what],
        status="predicted, not measured",
        status_kind="warn",
        rows=rows,
        columns=[machine, precision, "#Devices", *(Markup("#") + head for head in numbers), "Held back by"],
        panel=drawn("curve", "Images a second by data parallelism", partial(_curves, predictions), ""),
        command=command,
    )


def _curves(predictions: Sequence[Prediction], title: str) -> Drawing:
    """Images a second of each machine over its devices, with the range in which nine in ten published values lie."""
    axes = ax.panel(title, "devices", [row.machine.label for row in predictions])
    for number, row in enumerate(predictions):
        color = ax.COLORS[number % len(ax.COLORS)]
        counts, rates = zip(*row.curve, strict=True)
        ax.band(axes, counts, [rate / row.within for rate in rates], [rate * row.within for rate in rates], color)
        axes.plot(counts, rates, color=color, label=row.machine.label, marker="o", markersize=3.4)
        # from here on twice as many devices are less than 1.7 times as fast
        bend = next((at for at, (_, more) in pairwise(row.curve) if more < 1.7 * at[1]), None)
        if bend is not None:
            axes.plot(*([number] for number in bend), color=color, marker="D", markersize=7, fillstyle="none")
    points = [(count, rate, row.within) for row in predictions for count, rate in row.curve]
    ends = [end for _, rate, within in points for end in (rate / within, rate * within)]
    ax.log_axes(axes, [count for count, _, _ in points], ends)
    described = "Each line is a machine, the band is where nine in ten published values lie around such predictions."
    return described, ax.with_legend(axes)


_WIDTH, _TALL, _LOW, _GAP, _ROW = 216, 50, 28, 22, 26
_SKIP, _MARGIN, _CHIP = 26, 10, 20
# Heights of a drawing that is shown whole and of what is shown of others, and the space around it.
_WHOLE, _SHOWN, _PADDING = 1300, 760, 12
_BOLD, _LIGHT, _COST = 8.0, 7.2, 62  # width of a letter of a name, and of the seconds beside it


@dataclass
class LayerBox:
    """A layer, with what follows it alone."""

    number: int
    calls: list[Call]  # the layer's first
    before: list[int]  # boxes whose outputs it takes
    depth: int  # row, counted from the input
    stage: int
    lane: int = 0  # column


def _boxes_of(graph: Graph, stages: Sequence[int]) -> list[LayerBox]:
    """The boxes of a network in their rows; none is in two of the `stages` of its calls."""
    consumers = graph.consumers()
    box_of: dict[str, int] = {}
    boxes: list[LayerBox] = []
    for call, stage in zip(graph.calls, stages, strict=True):
        sources = [name for name in call.inputs if name in box_of]
        before = list(dict.fromkeys(box_of[name] for name in sources))
        box = boxes[before[0]] if len(sources) == 1 and OPERATIONS[call.op].follows else None
        if box and len(consumers[sources[0]]) == 1 and sources[0] in box.calls[-1].outputs and box.stage == stage:
            box.calls.append(call)
        else:
            depth = 1 + max((boxes[number].depth for number in before), default=-1)
            boxes.append(box := LayerBox(len(boxes), [call], before, depth, stage))
        box_of |= dict.fromkeys(call.outputs, box.number)
    return boxes


def _in_lanes(boxes: Sequence[LayerBox]) -> list[tuple[LayerBox, LayerBox, int]]:
    """Give every box its lane, row by row, those that lie on the longest way first; the edges from box to box, each
    with the lane in which it passes the rows between them: the first one that is free there."""
    remaining, rows = [1] * len(boxes), defaultdict[int, list[LayerBox]](list)
    for box in reversed(boxes):
        for number in box.before:
            remaining[number] = max(remaining[number], 1 + remaining[box.number])
    for box in sorted(boxes, key=lambda box: -remaining[box.number]):
        box.lane = len(rows[box.depth])
        rows[box.depth].append(box)
    pairs = ((boxes[number], box) for box in boxes for number in box.before)
    return [
        (source, box, max((len(rows[row]) for row in range(source.depth + 1, box.depth)), default=box.lane))
        for source, box in pairs
    ]


class NetworkDrawing:
    """A plan's network for `plan.html.jinja`: a group for every box, whose title says what the box costs."""

    def __init__(self, answer: Explanation) -> None:
        self._answer = answer
        self._placement = placement = answer.scored.placement
        self._ranks = busiest_ranks(answer.scored)
        self._strategies = {placed.call.name: placed.strategy for placed in placement.calls if is_choosing(placed.call)}
        boxes = _boxes_of(placement.graph, stages_of_calls(answer.scored))
        edges = _in_lanes(boxes)
        heights: dict[int, int] = {}
        for box in boxes:
            heights[box.depth] = max(heights.get(box.depth, 0), self._height(box))
        # where each row begins, and where the last one ends, in pixels
        self._tops = [_MARGIN, *(_MARGIN + end for end in accumulate(heights[row] + _ROW for row in sorted(heights)))]
        self._tops[-1] -= _ROW if heights else 0
        boxed = {box.lane for box in boxes}
        lanes = range(1 + max([*boxed, *(lane for _, _, lane in edges)], default=0))
        widths = [_WIDTH if lane in boxed else _SKIP for lane in lanes]
        lefts = [_MARGIN, *(_MARGIN + right for right in accumulate(width + _GAP for width in widths))]
        self._middles = [left + width / 2 for left, width in zip(lefts, widths, strict=False)]
        self.width, self.height = lefts[-1], self._tops[-1] + _MARGIN
        self.edges = [self._edge(*edge) for edge in edges]
        self.boxes = self._drawn(boxes)

    @property
    def canvas(self) -> int | None:
        """Pixels of the drawing that are shown at once, up to between two rows; None where all of it is."""
        if self._tops[-1] <= _WHOLE:
            return None
        return _PADDING + max(top for top in self._tops if top <= _SHOWN) - 4

    def _height(self, box: LayerBox) -> int:
        return _TALL if any(call.name in self._strategies for call in box.calls) else _LOW

    def _edge(self, source: LayerBox, target: LayerBox, lane: int) -> dict[str, Any]:
        """A line from box to box, with what is sent over it where a cut is between them."""
        x, y = self._middles[source.lane], float(self._tops[source.depth] + self._height(source))
        to, via, end = self._middles[target.lane], self._middles[lane], float(self._tops[target.depth])
        path, label = [f"M{x:g} {y:g}"], (to, end - 9)
        if target.depth > source.depth + 1:
            below, above = self._tops[source.depth + 1], self._tops[target.depth] - _ROW
            if via != x:
                path.append(f"V{below - _ROW:g}C{x:g} {below - 8:g} {via:g} {below - _ROW + 8:g} {via:g} {below + 6:g}")
            path.append(f"V{above:g}")
            x, y, label = via, above, (via, (below + above) / 2)
        if to != x:
            start = max(y, end - _ROW)
            path.append(f"V{start:g}C{x:g} {end - 8:g} {to:g} {start + 8:g} {to:g} {end:g}")
        else:
            path.append(f"V{end:g}")
        inputs = {name for call in target.calls for name in call.inputs}
        names = dict.fromkeys(name for call in source.calls for name in call.outputs if name in inputs)
        sent = sum(self._placement.local_bytes(name, self._ranks[source.stage]) for name in names)  # in a pass
        stages = f"stage {source.stage + 1} to stage {target.stage + 1}" if source.stage != target.stage else ""
        place = {"x": f"{label[0] + 6:g}", "y": f"{label[1]:g}"}
        return {"path": "".join(path), "stages": stages, "sent": size(sent), **place}

    def _drawn(self, boxes: Sequence[LayerBox]) -> list[dict[str, Any]]:
        """What a box costs is that of the layers that no box before it has."""
        computes: dict[str, float] = defaultdict(float)
        for span in self._answer.scored.timeline.spans:  # ranks of several stages have no calls in common
            if span.task.rank in self._ranks and span.task.kind in ("forward", "backward"):
                computes[span.task.name] += span.end - span.start
        unseen = {layer.layer: layer for layer in self._answer.layers}
        drawn_boxes = []
        for box in boxes:
            names = dict.fromkeys(call.layer for call in box.calls)
            layers = [unseen.pop(name) for name in names if name in unseen]
            computes_s = sum(computes[call.name] for call in box.calls) + sum(layer.copies_s for layer in layers)
            drawn_boxes.append(self._box(box, layers, computes_s))
        most = max((row["spent"] for row in drawn_boxes), default=0.0) or 1.0
        for row in drawn_boxes:
            full, waits = (_WIDTH * row[name] / most for name in ("spent", "waits"))
            row["bar"], row["waiting"] = f"{full - waits:.1f}", f"{waits:.1f}" if waits >= 0.5 else ""
        return drawn_boxes

    def _box(self, box: LayerBox, layers: Sequence[Layer], computes_s: float) -> dict[str, Any]:
        mesh = self._placement.mesh
        main = next((call for call in box.calls if call.name in self._strategies), box.calls[0])
        strategy = self._strategies.get(main.name, ())
        strategies, height, name = mesh.beside_stages(strategy), self._height(box), main.layer or main.name or main.op
        gives = box.calls[-1].outputs
        shape_text = shape(self._placement.local_shape(gives[0], self._ranks[box.stage])) if gives else ""
        waits_s = sum(layer.exposed_s for layer in layers)
        chips = [("stage", str(box.stage + 1))] if len(self._ranks) > 1 else []
        chips += [(kind, STRATEGIES[kind].letter) for kind in strategies]
        left = 11 + len(chips) * (_CHIP + 3) if chips else 10
        room = (_WIDTH - left - 8) / _BOLD if height == _TALL else (_WIDTH - left - _COST) / _LIGHT
        facts = self._facts(box, layers, strategies, shape_text) | {"computes": seconds(computes_s)}
        if self._answer.planned.devices > 1:
            facts |= {"waits": seconds(waits_s), "sends": size(sum(layer.sent_bytes for layer in layers))}
        held = sum(layer.parameter_bytes for layer in layers)
        facts["parameters"] = size(held) if held else ""
        if best := next((layer.next_best for layer in layers if layer.strategy and layer.next_best is not None), None):
            facts["next best"] = f"{','.join(mesh.beside_stages(best.strategy))}, {extra(best.extra_s)} an update"
        return {
            "look": strategies[0] if strategies else "stage" if strategy else "follows",
            "tall": height == _TALL,
            "height": height,
            "x": f"{self._middles[box.lane] - _WIDTH / 2:g}",
            "y": self._tops[box.depth],
            "title": "\n".join([name, *(f"{key}: {fact}" for key, fact in facts.items() if fact)]),
            "chips": [(kind, letter, 6 + number * (_CHIP + 3)) for number, (kind, letter) in enumerate(chips)],
            "left": left,
            "name": _name_in(name, "" if strategy else _verb(main), int(room)),
            "shape": shape_text,
            "spent": computes_s + waits_s,
            "waits": waits_s,
        }

    def _facts(self, box: LayerBox, layers: Sequence[Layer], strategies: Sequence[str], gives: str) -> dict[str, str]:
        mesh = self._placement.mesh
        axes = zip(strategies, mesh.beside_stages(mesh.names), strict=False)
        follows = [f"{call.layer or call.name} ({call.op})" for call in box.calls[1:]]
        return {
            "stage": f"{box.stage + 1} of {len(self._ranks)}" if len(self._ranks) > 1 else "",
            "strategy": ", ".join(name if name == axis else f"{name} on {axis}" for name, axis in axes),
            "work": box.calls[0].op,
            "with it": f"{', '.join(follows[:6])}{' …' if len(follows) > 6 else ''}",
            "takes on this rank": shape(layers[0].takes) if layers else "",
            "gives on this rank": gives,
        }


def _name_in(name: str, verb: str, most: int) -> str:
    """A name in so many letters: with what is done, where there is room, and else with its end, which says most."""
    if verb and not name.endswith(verb) and len(name) + len(verb) + 3 <= most:
        return f"{name} · {verb}"
    return name if len(name) <= most else f"…{name[-(most - 1) :]}"


def _verb(call: Call) -> str:
    word = getattr(call.function, "__name__", "").strip("_") if call.op in ("elementwise", "opaque") else call.op
    return {"iadd": "add", "radd": "add", "imul": "mul", "rmul": "mul"}.get(word, word) or call.op
