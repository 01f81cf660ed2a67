"""The network drawn layer by layer, in the colors of its strategies, as SVG for a page."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod

from markupsafe import Markup

from convoy.graph.graph import Call, Graph
from convoy.ops import OPERATIONS
from convoy.planner.layers import Layer, busiest_ranks, local_shape, stages_of_calls
from convoy.planner.search.prices import is_choosing
from convoy.planner.verdict import Explained
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
_SKIP, _MARGIN, _CHIP, _BAR = 26, 10, 20, 4
# Heights of a drawing that is shown whole and of what is shown of others, and the space around it.
_WHOLE, _SHOWN, _PADDING = 1300, 760, 12
_BOLD, _LIGHT, _COST = 8.0, 7.2, 62  # width of a letter of a name, and of the seconds beside it


@dataclass(frozen=True)
class _Cost:
    """The cost of a box in an update, and the layers that no box before it has."""

    layers: list[Layer]
    computes: float
    waits: float
    sends: int

    @property
    def spent(self) -> float:
        return self.computes + self.waits


class NetworkDrawing:
    """A plan's network as an `<svg>` with a group for every box; its title says what the box costs."""

    def __init__(self, explained: Explained) -> None:
        self._found = explained
        self._placement = explained.scored.placement
        self._ranks = busiest_ranks(explained.scored)
        self.grid = grid_of(self._placement.graph, stages_of_calls(explained.scored))
        self._strategies = {
            placed.call.name: placed.strategy for placed in self._placement.calls if is_choosing(placed.call)
        }
        heights: dict[int, int] = {}
        for box in self.grid.boxes:
            heights[box.depth] = max(heights.get(box.depth, 0), self._height(box))
        # where each row begins, and where the last one ends, in pixels
        self.tops = [_MARGIN, *(_MARGIN + end for end in accumulate(heights[row] + _ROW for row in sorted(heights)))]
        self.tops[-1] -= _ROW if heights else 0
        boxed = {box.lane for box in self.grid.boxes}
        widths = [_WIDTH if lane in boxed else _SKIP for lane in range(self.grid.num_lanes)]
        lefts = [_MARGIN, *(_MARGIN + right for right in accumulate(width + _GAP for width in widths))]
        self._width = lefts[-1]
        self._middles = [left + width / 2 for left, width in zip(lefts, widths, strict=False)]
        self._costs = self._box_costs()
        self._most = max((cost.spent for cost in self._costs), default=0.0) or 1.0

    def svg(self) -> Markup:
        head = Markup(
            '<svg class="network" role="img" width="{0}" height="{1}" viewBox="0 0 {0} {1}" aria-label="The network">'
        ).format(self._width, self.tops[-1] + _MARGIN)
        edges, boxes = map(self._edge, self.grid.edges), map(self._box, self.grid.boxes, self._costs)
        return head + Markup("").join([*edges, *boxes]) + Markup("</svg>")

    def _height(self, box: LayerBox) -> int:
        return _TALL if any(call.name in self._strategies for call in box.calls) else _LOW

    def _box_costs(self) -> list[_Cost]:
        timeline = self._found.scored.timeline
        computes: dict[str, float] = defaultdict(float)
        for span in timeline.spans:  # ranks of several stages have no calls in common
            if span.task.rank in self._ranks and span.task.kind in ("forward", "backward"):
                computes[span.task.name] += span.end - span.start
        layers = {layer.name: layer for layer in self._found.layers}
        costs = []
        for box in self.grid.boxes:
            box_layers = [
                layers.pop(name) for name in dict.fromkeys(call.layer for call in box.calls) if name in layers
            ]
            seconds = sum(computes[call.name] for call in box.calls) + sum(layer.copies for layer in box_layers)
            waits, sends = sum(layer.exposed for layer in box_layers), sum(layer.sent for layer in box_layers)
            costs.append(_Cost(box_layers, seconds, waits, sends))
        return costs

    def _edge(self, edge: Edge) -> Markup:
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
        if source.stage == target.stage:
            return Markup('<path class="edge" d="{}"/>').format("".join(path))
        sent, stages = size(self._crossing(source, target)), f"stage {source.stage + 1} to stage {target.stage + 1}"
        return Markup(
            '<g><title>{}: {} in a pass</title><path class="edge cut" d="{}"/>'
            '<text class="crossing" x="{:g}" y="{:g}">{}</text></g>'
        ).format(stages, sent, "".join(path), label[0] + 6, label[1], sent)

    def _crossing(self, source: LayerBox, target: LayerBox) -> int:
        """Bytes that a rank sends in a pass from one box to another in a later stage."""
        inputs = {name for call in target.calls for name in call.inputs}
        crossing = dict.fromkeys(name for call in source.calls for name in call.outputs if name in inputs)
        rank, values = self._ranks[source.stage], self._placement.graph.values
        return sum(prod(local_shape(self._placement, name, rank)) * values[name].dtype.itemsize for name in crossing)

    def _box(self, box: LayerBox, cost: _Cost) -> Markup:
        main = next((call for call in box.calls if call.name in self._strategies), box.calls[0])
        strategy = self._strategies.get(main.name, ())
        strategies = self._placement.mesh.beside_stages(strategy)
        name, height = main.layer or main.name or main.op, self._height(box)
        gives, rank = box.calls[-1].outputs, self._ranks[box.stage]
        shown = shape(local_shape(self._placement, gives[0], rank)) if gives else ""
        tall = height == _TALL
        parts = [
            Markup(
                '<g class="box {}" tabindex="0" data-spent="{:.3g}" transform="translate({:g} {:g})">'
                '<title>{}</title><rect class="body" width="{}" height="{}" rx="5"/>'
            ).format(
                strategies[0] if strategies else "stage" if strategy else "follows",
                cost.spent,
                self._middles[box.lane] - _WIDTH / 2,
                self.tops[box.depth],
                "\n".join([name, *self._facts(box, cost, strategy, shown)]),
                _WIDTH,
                height,
            )
        ]
        left, chips = 10, [(kind, STRATEGIES[kind].letter) for kind in strategies]
        if len(self._ranks) > 1:
            chips.insert(0, ("stage", str(box.stage + 1)))
        top = 6 if tall else (height - _BAR - _CHIP) / 2
        for number, (kind, letter) in enumerate(chips):
            at = 6 + number * (_CHIP + 3)
            parts.append(
                Markup(
                    '<rect class="chip {0}" x="{1}" y="{5:g}" width="{2}" height="{2}" rx="3"/>'
                    '<text class="letter" x="{3}" y="{6:g}">{4}</text>'
                ).format(kind, at, _CHIP, at + _CHIP / 2, letter, top, top + 14.5)
            )
            left = at + _CHIP + 8
        room = int((_WIDTH - left - 8) / _BOLD) if tall else int((_WIDTH - left - _COST) / _LIGHT)
        text = name_in(name, "" if strategy else _verb(main), room)
        parts.append(Markup('<text class="name" x="{}" y="{}">{}</text>').format(left, 20 if tall else 18, text))
        if tall:
            parts.append(Markup('<text class="shape" x="10" y="39">{}</text>').format(shown))
        if cost.spent > 0:
            full, waits = _WIDTH * cost.spent / self._most, _WIDTH * cost.waits / self._most
            parts.append(
                Markup(
                    '<text class="cost" x="{}" y="{}">{}</text><rect class="bar" y="{}" width="{:.1f}" height="{}"/>'
                ).format(_WIDTH - 9, 39 if tall else 18, seconds(cost.spent), height - _BAR, full - waits, _BAR)
            )
            if waits >= 0.5:
                parts.append(
                    Markup('<rect class="bar waits" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>').format(
                        full - waits, height - _BAR, waits, _BAR
                    )
                )
        return Markup("").join(parts) + Markup("</g>")

    def _facts(self, box: LayerBox, cost: _Cost, strategy: tuple[str, ...], shown: str) -> Iterator[str]:
        mesh, staged = self._placement.mesh, self._found.scored.staging
        if staged is not None:
            yield f"stage: {box.stage + 1} of {staged.number}"
        if mesh.beside_stages(strategy):
            axes = zip(mesh.beside_stages(strategy), mesh.beside_stages(mesh.names), strict=True)
            yield f"strategy: {', '.join(each if each == axis else f'{each} on {axis}' for each, axis in axes)}"
        yield f"work: {box.calls[0].op}"
        follows = [f"{call.layer or call.name} ({call.op})" for call in box.calls[1:]]
        if follows:
            yield f"with it: {', '.join(follows[:6])}{' …' if len(follows) > 6 else ''}"
        if cost.layers:
            yield f"takes on this rank: {shape(cost.layers[0].takes)}"
        yield f"gives on this rank: {shown}"
        yield f"computes: {seconds(cost.computes)}"
        if self._found.planned.devices > 1:
            yield f"waits: {seconds(cost.waits)}"
            yield f"sends: {size(cost.sends)}"
        held = sum(layer.parameters for layer in cost.layers)
        if held:
            yield f"parameters: {size(held)}"
        other = next((layer.other for layer in cost.layers if layer.strategy and layer.other is not None), None)
        if other is not None:
            yield f"next best: {','.join(mesh.beside_stages(other.strategy))}, {extra(other.seconds)} an update"


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
