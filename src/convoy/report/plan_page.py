"""The planner's page: one HTML file that says why a plan is the fastest, opens from disk and loads nothing."""

from typing import Any

from convoy import units
from convoy.files import to_json
from convoy.planner.cost.prediction import Scored
from convoy.planner.layers import Layer, Stage
from convoy.planner.planner import Planned
from convoy.planner.text import document
from convoy.planner.verdict import Explained, parts_of
from convoy.plans.explain import listed, some_ranks
from convoy.plans.mesh import Mesh
from convoy.plans.strategies import STRATEGIES
from convoy.report import pages
from convoy.report.network_drawing import NetworkDrawing, shown_height
from convoy.report.pages import data_uri
from convoy.report.tiles import Tile
from convoy.report.timeline_drawing import KINDS, PARTS, draw_timeline, kinds_in, num_left_out
from convoy.units import extra, per_second, rough_percent, seconds, shape, size

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


def plan_page(explained: Explained, command: str = "") -> str:
    """The page as HTML; `command` is the one that found the plan."""
    styles = ("report.css", "bars.css", "plan.css")
    return pages.render("plan.html.jinja", styles, ("copy.js", "plan.js"), **_content(explained, command))


def _content(explained: Explained, command: str) -> dict[str, Any]:
    planned, scored = explained.planned, explained.scored
    workload, total = planned.workload, scored.seconds or 1.0
    raw = to_json(document(explained), indent=1).encode()
    bars = _bars(planned, scored)
    mesh, drawing = scored.placement.mesh, NetworkDrawing(explained)
    used = {strategy for layer in explained.layers for strategy in mesh.beside_stages(layer.strategy)}
    stages = [_stage(number, stage, total) for number, stage in enumerate(explained.stages, 1)]
    return {
        "name": "plan",
        "title": workload.name,
        "subject": units.plural(planned.devices, "device"),
        "several": planned.devices > 1,
        "facts": _facts(explained),
        "verdict": explained.verdict,
        "status": _VERDICTS[explained.verdict.kind],
        "status_kind": "good" if explained.verdict.kind == "compute" else "warn",
        "calm": explained.verdict.kind == "compute",
        "plan": str(scored.plan),
        "axes": ", ".join(mesh.beside_stages(mesh.names)),
        "tiles": _tiles(explained),
        "bars": bars,
        "bar_legend": [(key, word) for key, word in _BAR_WORDS.items() if any(key in bar["keys"] for bar in bars)],
        "parts": [
            (name, PARTS[name], seconds(part.seconds), rough_percent(part.seconds / total), seconds(part.ideal))
            for name, part in ((part.name, part) for part in explained.parts)
        ],
        "changes": [(change.text, f"{change.gain:.2f}", seconds(change.seconds)) for change in explained.changes],
        "network": drawing.svg(),
        "canvas": shown_height(drawing.tops),
        "network_legend": [
            *([("stage", "1", "the stage")] if stages else []),
            *((name, one.letter, f"{name}: {one.effect}") for name, one in STRATEGIES.items() if name in used),
        ],
        "stages": stages,
        "omitted": drawing.grid.omitted,
        "timeline": draw_timeline(scored.timeline, mesh),
        "kinds": kinds_in(scored.timeline),
        "left_out": num_left_out(scored.timeline),
        "layers": [_layer(layer, mesh) for layer in explained.layers],
        "yaml": scored.plan.to_yaml().rstrip(),
        "command": command,
        "notes": list(explained.notes),
        "download": data_uri(raw, "application/json"),
        "size": units.prefixed(len(raw), "B"),
    }


def _facts(explained: Explained) -> list[str]:
    workload, scored = explained.planned.workload, explained.scored
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


def _tiles(explained: Explained) -> list[Tile]:
    planned, scored = explained.planned, explained.scored
    memory = scored.memory
    tiles = [
        Tile("An update", seconds(scored.seconds), "predicted", True),
        Tile("Samples a second", per_second(explained.samples_per_second), "all devices together"),
    ]
    if planned.devices > 1:
        note = f"{rough_percent(explained.efficiency)} efficiency; {seconds(planned.serial.seconds)} on one device"
        tiles.append(Tile("Speed-up", f"{explained.speedup:.2f} ×", note))
    if explained.stages:
        tiles.append(
            Tile("Bubble", rough_percent(scored.bubble), f"{len(explained.stages)} stages wait for each other")
        )
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
                "keys": {PARTS[part.name] for part in parts},
                "parts": [
                    (PARTS[part.name], 100 * part.seconds / longest, f"{part.name}: {seconds(part.seconds)}")
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


def _stage(number: int, stage: Stage, total: float) -> dict[str, Any]:
    return {
        "number": number,
        "layer": stage.layer or "the network itself",
        "ranks": some_ranks(stage.ranks),
        "takes": listed(stage.takes),
        "forward": size(stage.received.forward),
        "backward": size(stage.received.backward),
        "computes": seconds(stage.computes),
        "waits": f"{seconds(stage.waits)} ({rough_percent(stage.waits / total)})",
        "parameters": size(stage.memory.parameters),
        "memory": size(stage.memory.total),
    }


def _layer(layer: Layer, mesh: Mesh) -> dict[str, Any]:
    other = layer.other
    return {
        "name": layer.name or "the network itself",
        "stage": "" if layer.stage is None else str(layer.stage + 1),
        "work": ", ".join(dict.fromkeys(layer.ops)),
        "strategy": mesh.beside_stages(layer.strategy),
        "follows": not layer.strategy,
        "gives": shape(layer.gives),
        "computes": seconds(layer.forward + layer.backward + layer.copies),
        "waits": seconds(layer.exposed),
        "sends": size(layer.sent),
        "holds": size(layer.parameters),
        "other": ",".join(mesh.beside_stages(other.strategy)) if other is not None else "",
        "extra": extra(other.seconds) if other is not None else "",
    }
