"""A network as boxes on a grid: what follows a layer joins its box, branches stand side by side."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from convoy.graph.graph import Call, Graph

_FOLLOWS = frozenset(
    {
        "batch_norm",
        "dropout",
        "elementwise",
        "group_norm",
        "identity",
        "layer_norm",
        "lrn",
        "permute",
        "reshape",
        "rms_norm",
        "softmax",
    }
)
MOST_LANES = 8
"""Edges that would need more are left out."""


@dataclass
class Box:
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

    boxes: list[Box]
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


def _boxes(graph: Graph) -> list[Box]:
    consumers = graph.consumers()
    made: dict[str, int] = {}
    boxes: list[Box] = []
    for call in graph.calls:
        sources = [name for name in call.inputs if name in made]
        if len(sources) == 1 and call.op in _FOLLOWS and len(consumers[sources[0]]) == 1:
            box = boxes[made[sources[0]]]
            if sources[0] in box.calls[-1].outputs:
                box.calls.append(call)
                made |= dict.fromkeys(call.outputs, box.number)
                continue
        before = list(dict.fromkeys(made[name] for name in sources))
        depth = 1 + max((boxes[number].depth for number in before), default=-1)
        boxes.append(Box(len(boxes), [call], before, depth))
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
    rows: dict[int, list[Box]] = defaultdict(list)
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


def _place_row(row: Sequence[Box], boxes: list[Box], passing: dict[tuple[int, int], int], taken: set[int]) -> None:
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
