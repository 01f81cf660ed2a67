"""The network drawn layer by layer: where its boxes and lines stand, and what they say, for `plan.html.jinja`."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from convoy.graph.graph import Call, Graph
from convoy.ops import OPERATIONS
from convoy.planner.cost.local_op import local_bytes
from convoy.planner.layers import Layer, busiest_ranks, local_shape, stages_of_calls
from convoy.planner.search.prices import is_choosing
from convoy.planner.verdict import Explained
from convoy.plans.mesh import Mesh
from convoy.plans.strategies import STRATEGIES
from convoy.units import extra, seconds, shape, size

MOST_LANES = 8  # edges that would need more are left out


@dataclass
class LayerBox:
    """A layer, with what follows it alone."""

    number: int
    calls: list[Call]  # the layer's first
    before: list[int]  # boxes whose outputs it takes
    depth: int = 0  # row, counted from the input
    lane: int = 0  # column
    stage: int = 0


@dataclass(frozen=True)
class Edge:
    """From one box to another; `lane` is where it passes the rows between them."""

    source: int
    target: int
    lane: int


@dataclass
class Grid:
    """Boxes in rows and lanes."""

    boxes: list[LayerBox]
    edges: list[Edge] = field(default_factory=list)
    omitted: int = 0  # edges between boxes far apart, for which there was no lane

    @property
    def num_lanes(self) -> int:
        """Lanes that something stands or passes in."""
        return 1 + max([box.lane for box in self.boxes] + [edge.lane for edge in self.edges], default=0)


def grid_of(graph: Graph, stages: Sequence[int] = ()) -> Grid:
    """The boxes of a network, placed; none is in two of the `stages` of its calls."""
    grid = Grid(_boxes(graph, stages or (0,) * len(graph.calls)))
    _place(grid)
    return grid


def _boxes(graph: Graph, stages: Sequence[int]) -> list[LayerBox]:
    consumers = graph.consumers()
    made: dict[str, int] = {}
    boxes: list[LayerBox] = []
    for call, stage in zip(graph.calls, stages, strict=True):
        sources = [name for name in call.inputs if name in made]
        if len(sources) == 1 and OPERATIONS[call.op].follows and len(consumers[sources[0]]) == 1:
            box = boxes[made[sources[0]]]
            if sources[0] in box.calls[-1].outputs and box.stage == stage:
                box.calls.append(call)
                made |= dict.fromkeys(call.outputs, box.number)
                continue
        before = list(dict.fromkeys(made[name] for name in sources))
        depth = 1 + max((boxes[number].depth for number in before), default=-1)
        boxes.append(LayerBox(len(boxes), [call], before, depth, stage=stage))
        made |= dict.fromkeys(call.outputs, len(boxes) - 1)
    return boxes


def _place(grid: Grid) -> None:
    boxes = grid.boxes
    after: dict[int, list[int]] = defaultdict(list)
    for box in boxes:
        for number in box.before:
            after[number].append(box.number)
    remaining = [0] * len(boxes)
    for box in reversed(boxes):
        remaining[box.number] = 1 + max((remaining[number] for number in after[box.number]), default=0)
    rows: dict[int, list[LayerBox]] = defaultdict(list)
    for box in boxes:
        rows[box.depth].append(box)
    passing: dict[tuple[int, int], int] = {}
    for depth in range(max(rows, default=-1) + 1):
        occupied = {lane for (_, target), lane in passing.items() if boxes[target].depth > depth}
        _place_row(sorted(rows[depth], key=lambda box: -remaining[box.number]), boxes, passing, occupied)
        for source in rows[depth - 1] if depth else ():
            for target in after[source.number]:
                if boxes[target].depth > depth:
                    lane = _free(source.lane, occupied)
                    if lane >= MOST_LANES:
                        grid.omitted += 1
                        continue
                    passing[source.number, target] = lane
                    occupied.add(lane)
    for box in boxes:
        for number in sorted(after[box.number]):
            pair = (box.number, number)
            if pair in passing or boxes[number].depth == box.depth + 1:
                grid.edges.append(Edge(*pair, passing.get(pair, boxes[number].lane)))


def _place_row(
    row: Sequence[LayerBox], boxes: list[LayerBox], passing: dict[tuple[int, int], int], occupied: set[int]
) -> None:
    """Give the boxes of a row their lanes; each takes that of a box before it, if it can."""
    for box in row:
        lanes = [passing.get((number, box.number), boxes[number].lane) for number in box.before]
        lane = next((lane for lane in sorted(lanes) if lane not in occupied), None)
        box.lane = _free(min(lanes, default=0), occupied) if lane is None else lane
        occupied.add(box.lane)


def _free(near: int, occupied: set[int]) -> int:
    """The free lane that is nearest, to the right."""
    lane = near
    while lane in occupied:
        lane += 1
    return lane


_WIDTH, _TALL, _LOW, _GAP, _ROW = 216, 50, 28, 22, 26
_SKIP, _MARGIN, _CHIP = 26, 10, 20
# Heights of a drawing that is shown whole and of what is shown of others, and the space around it.
_WHOLE, _SHOWN, _PADDING = 1300, 760, 12
_BOLD, _LIGHT, _COST = 8.0, 7.2, 62  # width of a letter of a name, and of the seconds beside it


class NetworkDrawing:
    """A plan's network for `network.svg.jinja`: a group for every box, whose title says what the box costs."""

    def __init__(self, answer: Explained) -> None:
        self._answer = answer
        self._placement = placement = answer.scored.placement
        self._ranks = busiest_ranks(answer.scored)
        self.grid = grid_of(placement.graph, stages_of_calls(answer.scored))
        self._strategies = {one.call.name: one.strategy for one in placement.calls if is_choosing(one.call)}
        heights: dict[int, int] = {}
        for box in self.grid.boxes:
            heights[box.depth] = max(heights.get(box.depth, 0), self._height(box))
        # where each row begins, and where the last one ends, in pixels
        self.tops = [_MARGIN, *(_MARGIN + end for end in accumulate(heights[row] + _ROW for row in sorted(heights)))]
        self.tops[-1] -= _ROW if heights else 0
        boxed = {box.lane for box in self.grid.boxes}
        widths = [_WIDTH if lane in boxed else _SKIP for lane in range(self.grid.num_lanes)]
        lefts = [_MARGIN, *(_MARGIN + right for right in accumulate(width + _GAP for width in widths))]
        self._middles = [left + width / 2 for left, width in zip(lefts, widths, strict=False)]
        self.width, self.height = lefts[-1], self.tops[-1] + _MARGIN
        self.edges = list(map(self._edge, self.grid.edges))
        self.boxes = self._boxes()

    def _height(self, box: LayerBox) -> int:
        return _TALL if any(call.name in self._strategies for call in box.calls) else _LOW

    def _edge(self, edge: Edge) -> dict[str, Any]:
        """A line from box to box, with what is sent over it where a cut is between them."""
        source, target = self.grid.boxes[edge.source], self.grid.boxes[edge.target]
        x, y = self._middles[source.lane], float(self.tops[source.depth] + self._height(source))
        to, via, end = self._middles[target.lane], self._middles[edge.lane], float(self.tops[target.depth])
        path, label = [f"M{x:g} {y:g}"], (to, end - 9)
        if target.depth > source.depth + 1:
            below, above = self.tops[source.depth + 1], self.tops[target.depth] - _ROW
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
        sent = sum(local_bytes(self._placement, name, self._ranks[source.stage]) for name in names)  # in a pass
        stages = f"stage {source.stage + 1} to stage {target.stage + 1}" if source.stage != target.stage else ""
        return {
            "path": "".join(path),
            "stages": stages,
            "sent": size(sent),
            "x": f"{label[0] + 6:g}",
            "y": f"{label[1]:g}",
        }

    def _boxes(self) -> list[dict[str, Any]]:
        """What a box costs is that of the layers that no box before it has."""
        computes: dict[str, float] = defaultdict(float)
        for span in self._answer.scored.timeline.spans:  # ranks of several stages have no calls in common
            if span.task.rank in self._ranks and span.task.kind in ("forward", "backward"):
                computes[span.task.name] += span.end - span.start
        unseen = {layer.layer: layer for layer in self._answer.layers}
        boxes = []
        for box in self.grid.boxes:
            names = dict.fromkeys(call.layer for call in box.calls)
            layers = [unseen.pop(name) for name in names if name in unseen]
            computes_s = sum(computes[call.name] for call in box.calls) + sum(layer.copies_s for layer in layers)
            boxes.append(self._box(box, layers, computes_s))
        most = max((drawn["spent"] for drawn in boxes), default=0.0) or 1.0
        for drawn in boxes:
            full, waits = (_WIDTH * drawn[name] / most for name in ("spent", "waits"))
            drawn["bar"], drawn["waiting"] = f"{full - waits:.1f}", f"{waits:.1f}" if waits >= 0.5 else ""
        return boxes

    def _box(self, box: LayerBox, layers: Sequence[Layer], computes_s: float) -> dict[str, Any]:
        placement, staged = self._placement, len(self._ranks) > 1
        main = next((call for call in box.calls if call.name in self._strategies), box.calls[0])
        strategy = self._strategies.get(main.name, ())
        strategies = placement.mesh.beside_stages(strategy)
        name, height, gives = main.layer or main.name or main.op, self._height(box), box.calls[-1].outputs
        shown = shape(local_shape(placement, gives[0], self._ranks[box.stage])) if gives else ""
        waits_s = sum(layer.exposed_s for layer in layers)
        facts = {
            "stage": f"{box.stage + 1} of {len(self._ranks)}" if staged else "",
            **_facts(box, layers, strategy, placement.mesh),
            "gives on this rank": shown,
            "computes": seconds(computes_s),
        }
        if self._answer.planned.devices > 1:
            facts |= {"waits": seconds(waits_s), "sends": size(sum(layer.sent_bytes for layer in layers))}
        held = sum(layer.parameter_bytes for layer in layers)
        facts["parameters"] = size(held) if held else ""
        other = next((layer.next_best for layer in layers if layer.strategy and layer.next_best is not None), None)
        if other is not None:
            to = ",".join(placement.mesh.beside_stages(other.strategy))
            facts["next best"] = f"{to}, {extra(other.extra_s)} an update"
        chips = [("stage", str(box.stage + 1))] * staged + [(kind, STRATEGIES[kind].letter) for kind in strategies]
        left = 11 + len(chips) * (_CHIP + 3) if chips else 10
        tall = height == _TALL
        room = int((_WIDTH - left - 8) / _BOLD) if tall else int((_WIDTH - left - _COST) / _LIGHT)
        return {
            "look": strategies[0] if strategies else "stage" if strategy else "follows",
            "tall": tall,
            "height": height,
            "x": f"{self._middles[box.lane] - _WIDTH / 2:g}",
            "y": self.tops[box.depth],
            "title": "\n".join([name, *(f"{key}: {fact}" for key, fact in facts.items() if fact)]),
            "chips": [(kind, letter, 6 + number * (_CHIP + 3)) for number, (kind, letter) in enumerate(chips)],
            "left": left,
            "name": name_in(name, "" if strategy else _verb(main), room),
            "shape": shown,
            "spent": computes_s + waits_s,
            "waits": waits_s,
        }


def _facts(box: LayerBox, layers: Sequence[Layer], strategy: tuple[str, ...], mesh: Mesh) -> dict[str, str]:
    axes = zip(mesh.beside_stages(strategy), mesh.beside_stages(mesh.names), strict=False)
    follows = [f"{call.layer or call.name} ({call.op})" for call in box.calls[1:]]
    return {
        "strategy": ", ".join(name if name == axis else f"{name} on {axis}" for name, axis in axes),
        "work": box.calls[0].op,
        "with it": f"{', '.join(follows[:6])}{' …' if len(follows) > 6 else ''}",
        "takes on this rank": shape(layers[0].takes) if layers else "",
    }


def shown_height(tops: Sequence[int]) -> int | None:
    """Pixels of a drawing with rows at `tops` that are shown at once, up to between two rows; None where all of it
    is."""
    if tops[-1] <= _WHOLE:
        return None
    return _PADDING + max(top for top in tops if top <= _SHOWN) - 4


def name_in(name: str, verb: str, most: int) -> str:
    """A name in so many letters: with what is done, where there is room, and else with its end, which says most."""
    if verb and not name.endswith(verb) and len(name) + len(verb) + 3 <= most:
        return f"{name} · {verb}"
    return name if len(name) <= most else f"…{name[-(most - 1) :]}"


def _verb(call: Call) -> str:
    word = getattr(call.function, "__name__", "").strip("_") if call.op in ("elementwise", "opaque") else call.op
    return {"iadd": "add", "radd": "add", "imul": "mul", "rmul": "mul"}.get(word, word) or call.op
