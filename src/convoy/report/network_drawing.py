"""The network drawn layer by layer, in the colors of its strategies, as SVG for a page."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from convoy.graph.graph import Call, Graph
from convoy.ops import OPERATIONS
from convoy.planner.layers import Layer, local_shape
from convoy.planner.search.prices import is_choosing
from convoy.planner.verdict import Explained
from convoy.report.timeline_drawing import STRATEGIES
from convoy.units import extra, seconds, shape, size

MOST_LANES = 8
"""Edges that would need more are left out."""


@dataclass
class LayerBox:
    """A layer, with what follows it alone.

    Attributes:
        calls: the layer's first.
        before: boxes whose outputs it takes.
        depth: row, counted from the input.
        lane: column.
    """

    number: int
    calls: list[Call]
    before: list[int]
    depth: int = 0
    lane: int = 0


@dataclass(frozen=True)
class Edge:
    """From one box to another; `lane` is where it passes the rows between them."""

    source: int
    target: int
    lane: int


@dataclass
class Grid:
    """Boxes in rows and lanes.

    Attributes:
        omitted: edges between boxes far apart, for which there was no lane.
    """

    boxes: list[LayerBox]
    edges: list[Edge] = field(default_factory=list)
    omitted: int = 0

    @property
    def num_lanes(self) -> int:
        """Lanes that something stands or passes in."""
        return 1 + max([box.lane for box in self.boxes] + [edge.lane for edge in self.edges], default=0)


def grid_of(graph: Graph) -> Grid:
    """The boxes of a network, placed."""
    grid = Grid(_boxes(graph))
    _place(grid)
    return grid


def _boxes(graph: Graph) -> list[LayerBox]:
    consumers = graph.consumers()
    made: dict[str, int] = {}
    boxes: list[LayerBox] = []
    for call in graph.calls:
        sources = [name for name in call.inputs if name in made]
        if len(sources) == 1 and OPERATIONS[call.op].follows and len(consumers[sources[0]]) == 1:
            box = boxes[made[sources[0]]]
            if sources[0] in box.calls[-1].outputs:
                box.calls.append(call)
                made |= dict.fromkeys(call.outputs, box.number)
                continue
        before = list(dict.fromkeys(made[name] for name in sources))
        depth = 1 + max((boxes[number].depth for number in before), default=-1)
        boxes.append(LayerBox(len(boxes), [call], before, depth))
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
        taken = {lane for (_, target), lane in passing.items() if boxes[target].depth > depth}
        _place_row(sorted(rows[depth], key=lambda box: -remaining[box.number]), boxes, passing, taken)
        for source in rows[depth - 1] if depth else ():
            for target in after[source.number]:
                if boxes[target].depth > depth:
                    lane = _free(source.lane, taken)
                    if lane >= MOST_LANES:
                        grid.omitted += 1
                        continue
                    passing[source.number, target] = lane
                    taken.add(lane)
    for box in boxes:
        for number in sorted(after[box.number]):
            pair = (box.number, number)
            if pair in passing or boxes[number].depth == box.depth + 1:
                grid.edges.append(Edge(*pair, passing.get(pair, boxes[number].lane)))


def _place_row(
    row: Sequence[LayerBox], boxes: list[LayerBox], passing: dict[tuple[int, int], int], taken: set[int]
) -> None:
    """Give the boxes of a row their lanes; each takes that of a box before it, if it can."""
    for box in row:
        wanted = [passing.get((number, box.number), boxes[number].lane) for number in box.before]
        lane = next((lane for lane in sorted(wanted) if lane not in taken), None)
        box.lane = _free(min(wanted, default=0), taken) if lane is None else lane
        taken.add(box.lane)


def _free(near: int, taken: set[int]) -> int:
    """The free lane that is nearest, to the right."""
    lane = near
    while lane in taken:
        lane += 1
    return lane


_WIDTH, _TALL, _LOW, _GAP, _ROW = 216, 50, 28, 22, 26
_SKIP, _MARGIN, _CHIP, _BAR = 26, 10, 20, 4
_WHOLE, _SHOWN, _PADDING = 1300, 760, 12
"""Heights of a drawing that is shown whole and of what is shown of others, and the space around it."""
_BOLD, _LIGHT, _COST = 8.0, 7.2, 62
"""Width of a letter of a name, and of the seconds beside it."""


@dataclass(frozen=True)
class _Cost:
    """What a box costs in an update."""

    computes: float
    waits: float
    sends: int


def draw_network(found: Explained) -> Markup:
    """An `<svg>` with a group for every box; its title says what the box costs."""
    placement = found.scored.placement
    grid = grid_of(placement.graph)
    costs, lanes = _costs(found, grid), _lanes(grid)
    strategies = {placed.call.name: placed.strategy for placed in placement.calls if is_choosing(placed.call)}
    most = max((cost.computes + cost.waits for cost in costs.values()), default=0.0) or 1.0
    tops = _tops(grid, strategies)
    width, height = _MARGIN + sum(w + _GAP for w in lanes.values()), tops[-1] + _MARGIN
    lefts, left = {}, _MARGIN
    for lane, its in lanes.items():
        lefts[lane], left = left, left + its + _GAP
    middles = {lane: lefts[lane] + lanes[lane] / 2 for lane in lanes}
    parts = [_edge(edge, grid, tops, middles, strategies) for edge in grid.edges]
    layers = {layer.name: layer for layer in found.layers}
    named: set[str] = set()
    for box in grid.boxes:
        first = [call.layer for call in box.calls if call.layer not in named]
        named.update(first)
        about = [layers[name] for name in dict.fromkeys(first) if name in layers]
        x, y = middles[box.lane] - _WIDTH / 2, tops[box.depth]
        parts.append(_box(found, box, about, costs[box.number], most, x, y, strategies))
    head = Markup(
        '<svg class="network" role="img" width="{}" height="{}" viewBox="0 0 {} {}" aria-label="The network">'
    ).format(width, height, width, height)
    return head + Markup("").join(parts) + Markup("</svg>")


def canvas_height(found: Explained) -> int | None:
    """Pixels of the drawing that are shown at once, up to between two rows; None where all of it is."""
    placement = found.scored.placement
    strategies = {placed.call.name: placed.strategy for placed in placement.calls if is_choosing(placed.call)}
    return shown_height(_tops(grid_of(placement.graph), strategies))


def shown_height(tops: Sequence[int]) -> int | None:
    """The same, from where each row begins and the last one ends."""
    if tops[-1] <= _WHOLE:
        return None
    return _PADDING + max(top for top in tops if top <= _SHOWN) - 4


def omitted_edges(found: Explained) -> int:
    """Connections that the drawing leaves out."""
    return grid_of(found.scored.placement.graph).omitted


def _costs(found: Explained, grid: Grid) -> dict[int, _Cost]:
    timeline = found.scored.timeline
    computes: dict[str, float] = defaultdict(float)
    for span in timeline.spans:
        if span.task.rank == timeline.busiest and span.task.kind in ("forward", "backward"):
            computes[span.task.name] += span.end - span.start
    layers = {layer.name: layer for layer in found.layers}
    costs: dict[int, _Cost] = {}
    named: set[str] = set()
    for box in grid.boxes:
        own = [layers[name] for name in dict.fromkeys(call.layer for call in box.calls) if name not in named]
        named.update(layer.name for layer in own)
        costs[box.number] = _Cost(
            sum(computes[call.name] for call in box.calls) + sum(layer.copies for layer in own),
            sum(layer.exposed for layer in own),
            sum(layer.sent for layer in own),
        )
    return costs


def _lanes(grid: Grid) -> dict[int, int]:
    boxed = {box.lane for box in grid.boxes}
    return {lane: _WIDTH if lane in boxed else _SKIP for lane in range(grid.num_lanes)}


def _is_tall(box: LayerBox, strategies: dict[str, tuple[str, ...]]) -> bool:
    return any(call.name in strategies for call in box.calls)


def _height(box: LayerBox, strategies: dict[str, tuple[str, ...]]) -> int:
    return _TALL if _is_tall(box, strategies) else _LOW


def _tops(grid: Grid, strategies: dict[str, tuple[str, ...]]) -> list[int]:
    """Where each row begins, and where the last one ends."""
    heights: dict[int, int] = {}
    for box in grid.boxes:
        heights[box.depth] = max(heights.get(box.depth, 0), _height(box, strategies))
    tops, top = [], _MARGIN
    for depth in sorted(heights):
        tops.append(top)
        top += heights[depth] + _ROW
    return [*tops, top - _ROW]


def _edge(
    edge: Edge, grid: Grid, tops: list[int], middles: dict[int, float], strategies: dict[str, tuple[str, ...]]
) -> Markup:
    source, target = grid.boxes[edge.source], grid.boxes[edge.target]
    x, y = middles[source.lane], float(tops[source.depth] + _height(source, strategies))
    to, via, end = middles[target.lane], middles[edge.lane], float(tops[target.depth])
    path = [f"M{x:g} {y:g}"]
    if target.depth > source.depth + 1:
        below, above = tops[source.depth + 1], tops[target.depth] - _ROW
        if via != x:
            path.append(f"V{below - _ROW:g}C{x:g} {below - 8:g} {via:g} {below - _ROW + 8:g} {via:g} {below + 6:g}")
        path.append(f"V{above:g}")
        y = above
        x = via
    if to != x:
        start = max(y, end - _ROW)
        path.append(f"V{start:g}C{x:g} {end - 8:g} {to:g} {start + 8:g} {to:g} {end:g}")
    else:
        path.append(f"V{end:g}")
    return Markup('<path class="edge" d="{}"/>').format("".join(path))


def _box(
    found: Explained,
    box: LayerBox,
    layers: list[Layer],
    cost: _Cost,
    most: float,
    x: float,
    y: float,
    strategies: dict[str, tuple[str, ...]],
) -> Markup:
    main = next((call for call in box.calls if call.name in strategies), box.calls[0])
    strategy = strategies.get(main.name, ())
    name = main.layer or main.name or main.op
    gives = box.calls[-1].outputs
    rank = found.scored.timeline.busiest
    shown = shape(local_shape(found.scored.placement, gives[0], rank)) if gives else ""
    spent = cost.computes + cost.waits
    title = "\n".join(_title(found, box, layers, cost, strategy, name, shown))
    tall = bool(strategy) or _is_tall(box, strategies)
    height = _TALL if tall else _LOW
    key = STRATEGIES[strategy[0]].key if strategy else "follows"
    parts = [
        Markup('<g class="box {}" tabindex="0" data-spent="{:.3g}" transform="translate({:g} {:g})">').format(
            key, spent, x, y
        ),
        Markup("<title>{}</title>").format(title),
        Markup('<rect class="body" width="{}" height="{}" rx="5"/>').format(_WIDTH, height),
    ]
    left = 10
    for number, each in enumerate(strategy):
        look = STRATEGIES[each]
        at = 6 + number * (_CHIP + 3)
        parts.append(
            Markup(
                '<rect class="chip {0}" x="{1}" y="6" width="{2}" height="{2}" rx="3"/>'
                '<text class="letter" x="{3}" y="20.5">{4}</text>'
            ).format(look.key, at, _CHIP, at + _CHIP / 2, look.letter)
        )
        left = at + _CHIP + 8
    room = int((_WIDTH - left - 8) / _BOLD) if tall else int((_WIDTH - left - _COST) / _LIGHT)
    parts.append(
        Markup('<text class="name" x="{}" y="{}">{}</text>').format(
            left, 20 if tall else 18, name_in(name, "" if strategy else _verb(main), room)
        )
    )
    if tall:
        parts.append(Markup('<text class="shape" x="10" y="39">{}</text>').format(shown))
    if spent > 0:
        at = 39 if tall else 18
        parts.append(Markup('<text class="cost" x="{}" y="{}">{}</text>').format(_WIDTH - 9, at, seconds(spent)))
        full, waits = _WIDTH * spent / most, _WIDTH * cost.waits / most
        parts.append(
            Markup('<rect class="bar" y="{}" width="{:.1f}" height="{}"/>').format(height - _BAR, full - waits, _BAR)
        )
        if waits >= 0.5:
            parts.append(
                Markup('<rect class="bar waits" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>').format(
                    full - waits, height - _BAR, waits, _BAR
                )
            )
    return Markup("").join(parts) + Markup("</g>")


def _title(
    found: Explained, box: LayerBox, layers: list[Layer], cost: _Cost, strategy: tuple[str, ...], name: str, shown: str
) -> list[str]:
    mesh = found.scored.placement.mesh
    lines = [name]
    if strategy:
        on = [s if s == axis else f"{s} on {axis}" for s, axis in zip(strategy, mesh.names, strict=True)]
        lines.append(f"strategy: {', '.join(on)}")
    follows = [f"{call.layer or call.name} ({call.op})" for call in box.calls[1:]]
    lines.append(f"work: {box.calls[0].op}")
    if follows:
        lines.append(f"with it: {', '.join(follows[:6])}{' …' if len(follows) > 6 else ''}")
    if layers:
        lines.append(f"takes on this rank: {shape(layers[0].takes)}")
    lines.append(f"gives on this rank: {shown}")
    lines.append(f"computes: {seconds(cost.computes)}")
    if found.planned.devices > 1:
        lines.append(f"waits: {seconds(cost.waits)}")
        lines.append(f"sends: {size(cost.sends)}")
    held = sum(layer.parameters for layer in layers)
    if held:
        lines.append(f"parameters: {size(held)}")
    other = next((layer.other for layer in layers if layer.strategy and layer.other is not None), None)
    if other is not None:
        lines.append(f"next best: {','.join(other.strategy)}, {extra(other.seconds)} an update")
    return lines


def name_in(name: str, verb: str, most: int) -> str:
    """A name in so many letters: with what is done, where there is room, and else with its end, which says most."""
    if verb and not name.endswith(verb) and len(name) + len(verb) + 3 <= most:
        return f"{name} · {verb}"
    return name if len(name) <= most else f"…{name[-(most - 1) :]}"


def _verb(call: Call) -> str:
    word = getattr(call.function, "__name__", "").strip("_") if call.op in ("elementwise", "opaque") else call.op
    return {"iadd": "add", "radd": "add", "imul": "mul", "rmul": "mul"}.get(word, word) or call.op


def legend(found: Explained) -> list[tuple[str, str, str]]:
    """Key, letter and word of the strategies in the drawing."""
    used = {each for layer in found.layers for each in layer.strategy}
    return [(look.key, look.letter, look.word) for name, look in STRATEGIES.items() if name in used]
