"""A watched update as events, which lie beside the predicted ones in a trace."""

import itertools
from collections.abc import Sequence
from statistics import median_low

from convoy.cost.task import Stream
from convoy.cost.trace import Event
from convoy.engine.watched import Kind, Stretch, WatchedUpdate

_STREAMS: dict[Kind, Stream] = {"transfer": "transfers", "gradient": "gradients"}
_TASKS = {"input": "around", "rest": "around"}
_NAMES = {"update": "optimiser"}


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
