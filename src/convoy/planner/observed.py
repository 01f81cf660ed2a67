"""A watched update as events, which lie beside the predicted ones in a trace.

What watched updates of a real training say: where the time went, and how long each piece took.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from convoy.engine.watched import Kind, Stretch, WatchedUpdate
from convoy.planner.cost.local import BatchNorm, piece
from convoy.planner.cost.local_op import VIEWS, Piece
from convoy.planner.cost.program import inside
from convoy.planner.cost.timeline import Stream
from convoy.planner.cost.times import Times
from convoy.planner.cost.trace import Event
from convoy.plans.place import Placement

PARTS = ("input", "forward", "backward", "rest", "packing", "waiting", "optimizer")
"""Of an update: `rest` is the loss and all that has no other name, `waiting` what is sent and waited for."""
_PARTS = {
    "input": "input",
    "forward": "forward",
    "backward": "backward",
    "rest": "rest",
    "copy": "packing",
    "transfer": "waiting",
    "gradient": "waiting",
    "update": "optimizer",
}


@dataclass(frozen=True)
class LayerSeconds:
    """Of a layer in an update.

    Attributes:
        computes: forward, backward and packing.
        waits: exchanging what layers need of others, and waiting for it.
    """

    computes: float = 0.0
    waits: float = 0.0

    def __add__(self, other: "LayerSeconds") -> "LayerSeconds":
        return LayerSeconds(self.computes + other.computes, self.waits + other.waits)


@dataclass(frozen=True)
class Observed:
    """An update on one rank.

    Attributes:
        parts: seconds by name, as `PARTS` has them.
        layers: by name; empty where the network cannot be watched.
        gradients: seconds in which gradients, weights and statistics were exchanged, when all layers were done.
    """

    parts: Mapping[str, float]
    layers: Mapping[str, LayerSeconds]
    gradients: float


def observed(update: WatchedUpdate, alone: bool = False) -> Observed:
    """Where the time of a watched update went; a device that is alone waits for nobody."""
    parts = dict.fromkeys(PARTS, 0.0)
    layers: dict[str, LayerSeconds] = {}
    names = {placed.call.name: placed.call.layer for one in update.placements for placed in one.calls}
    gradients = 0.0
    for stretch in update.stretches():
        part = _PARTS[stretch.kind]
        if update.placements and part in ("forward", "backward") and not stretch.call:
            part = "rest"  # of the network's passes, the calls alone; what is around them is the loss's
        parts["rest" if alone and part == "waiting" else part] += stretch.seconds
        gradients += stretch.seconds if stretch.kind == "gradient" else 0.0
        if stretch.kind in ("forward", "backward", "copy", "transfer") and update.placements:
            layer = names.get(stretch.call, "")
            waits = stretch.kind == "transfer"
            one = LayerSeconds(waits=stretch.seconds) if waits else LayerSeconds(computes=stretch.seconds)
            if part != "rest":
                layers[layer] = layers.get(layer, LayerSeconds()) + one
    return Observed(parts, layers, gradients)


def middle(updates: Sequence[Observed]) -> Observed:
    """The median of every number; of no updates, no time."""
    names = dict.fromkeys(name for one in updates for name in one.layers)
    return Observed(
        {part: median([one.parts[part] for one in updates] or [0.0]) for part in PARTS},
        {
            name: LayerSeconds(
                median(one.layers.get(name, LayerSeconds()).computes for one in updates),
                median(one.layers.get(name, LayerSeconds()).waits for one in updates),
            )
            for name in names
        },
        median([one.gradients for one in updates] or [0.0]),
    )


def observed_pieces(
    updates: Sequence[WatchedUpdate],
    rank: int,
    batch_norm: BatchNorm,
    microbatch: int,
    typed: Callable[[Placement], Placement] = lambda placement: placement,
) -> dict[Piece, Times]:
    """How long the pieces of a rank took: the mean over calls and passes that have the same, the median over updates.

    Left out are views, empty pieces, and calls inside of which ranks wait for each other.

    Args:
        updates: in which gradients were sent after the backward pass, so that none took cycles from it.
        rank: this one.
        batch_norm, microbatch: as for `convoy.planner.cost.local.piece`.
        typed: gives a placement the types that its values have under autocast.
    """
    found: dict[Piece, list[Times]] = defaultdict(list)
    for update in updates:
        for own, times in _of_update(update, rank, batch_norm, microbatch, typed).items():
            found[own].append(mean(times))
    return {
        own: Times(median(one.forward for one in times), median(one.backward for one in times))
        for own, times in found.items()
    }


def mean(times: Sequence[Times]) -> Times:
    """The mean of some times."""
    return sum(times, Times()) * (1 / len(times))


def _of_update(
    update: WatchedUpdate,
    rank: int,
    batch_norm: BatchNorm,
    microbatch: int,
    typed: Callable[[Placement], Placement],
) -> dict[Piece, list[Times]]:
    spent: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for stretch in update.stretches():
        if stretch.kind in ("forward", "backward") and stretch.call:
            spent[stretch.run, stretch.call][stretch.kind == "backward"] += stretch.seconds
    found: dict[Piece, list[Times]] = defaultdict(list)
    for run, placement in enumerate(map(typed, update.placements)):
        for placed in placement.calls:
            if (run, placed.call.name) not in spent:
                continue
            own = piece(placed, placement, rank, batch_norm=batch_norm, microbatch=microbatch)
            talks = inside(placed, placement.graph, placement.mesh, own, batch_norm).axes
            if not talks and not own.is_empty and own.op not in VIEWS:
                found[own].append(Times(*spent[run, placed.call.name]))
    return found


_STREAMS: dict[Kind, Stream] = {"transfer": "transfers", "gradient": "gradients"}
_TASKS = {"input": "around", "rest": "around"}
_NAMES = {"update": "optimizer"}


def observed_events(update: WatchedUpdate, rank: int, alone: bool = False) -> list[Event]:
    """What a rank did in an update, one thing after the other, from its first mark to its last.

    A message is the time for which the rank had nothing to do but to send it, or to wait for it; what is sent beside
    the computation has no marks.

    Args:
        update: that was watched.
        rank: this one.
        alone: a device that waits for nobody.
    """
    layers = {placed.call.name: placed.call.layer for one in update.placements for placed in one.calls}

    def what(stretch: Stretch) -> tuple[Kind, str]:
        kind = stretch.kind
        if alone and kind in _STREAMS:
            return "rest", ""
        if update.placements and kind in ("forward", "backward") and not stretch.call:
            return "rest", ""  # around the calls of the network: its loss, and the beginnings of its passes
        return kind, stretch.call

    found: list[Event] = []
    now = 0.0
    for (kind, call), those in itertools.groupby(update.stretches(), what):
        seconds = sum(one.seconds for one in those)
        layer, task = layers.get(call, ""), _TASKS.get(kind, kind)
        name = layer if kind == "transfer" else call
        found.append(
            Event(rank, _STREAMS.get(kind, "compute"), task, layer, name or _NAMES.get(kind, kind), now, seconds)
        )
        now += seconds
    return found


def typical(lengths: Sequence[Sequence[float]]) -> int:
    """Which of some updates took neither longest nor shortest.

    Args:
        lengths: seconds of every update, by rank; an update is as long as it is on the slowest rank.
    """
    slowest = [max(each) for each in zip(*lengths, strict=True)]
    return slowest.index(median_low(slowest))
