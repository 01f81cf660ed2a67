"""Names a rank that is slower than the others, for whom all of them wait."""

import socket
import statistics
from collections import defaultdict
from collections.abc import Sequence

from convoy.training.ranks.devices import Devices
from convoy.training.ranks.division import Division

STRETCH_S, STRETCH_UPDATES = 2.0, 10
"""What is compared is the work of at least so long, and of so many updates."""
RATIO = 1.3
"""How much longer than the others, in the middle, a slow rank works."""
LOSS_SHARE = 0.1
"""The share of an update that all others must lose by it."""
IN_A_ROW = 3
"""Stretches in which the same rank must be slow before it is named; then again after twice as many, and so on."""


class SlowRanks:
    """Compares what the ranks need for the same number of samples, without their waits for each other.

    Only those are compared that do the same work: ranks with samples, in the same place of their model groups. All
    ranks make it.

    Args:
        devices: the ranks.
    """

    def __init__(self, devices: Devices) -> None:
        self._ranks = devices.gather((devices.sample_rank, socket.gethostname()))
        self._places = _places([part for part, _ in self._ranks])
        self._seconds = [0.0] * len(self._ranks)
        self._updates = 0
        self._took_s = 0.0
        self._slow: int | None = None
        self._times = 0
        self._next = IN_A_ROW

    def look(self, own_s: Sequence[float], updates: int, took_s: float, division: Division) -> str | None:
        """Take up some updates.

        Args:
            own_s: seconds of every rank's own work in them; empty where they were not taken.
            updates: how many they were.
            took_s: seconds that they took all ranks together.
            division: whose are which microbatches.

        Returns:
            What to say, if anything.
        """
        if len(own_s) != len(self._ranks) or len(self._ranks) == 1:
            return None
        self._seconds = [a + b for a, b in zip(self._seconds, own_s, strict=True)]
        self._updates += updates
        self._took_s += took_s
        if self._updates < STRETCH_UPDATES or self._took_s < STRETCH_S:
            return None
        seconds, updates, took_s = self._seconds, self._updates, self._took_s
        self._seconds, self._updates, self._took_s = [0.0] * len(seconds), 0, 0.0
        return self._judge([s / updates for s in seconds], took_s / updates, division)

    def _judge(self, update_s: Sequence[float], took_s: float, division: Division) -> str | None:
        samples = [len(division.positions(part)) for part, _ in self._ranks]
        per_sample = [s / n if n else 0.0 for s, n in zip(update_s, samples, strict=True)]
        found = []
        for place in self._places:
            busy = [rank for rank in place if samples[rank]]
            if len(busy) > 1:
                worst = max(busy, key=per_sample.__getitem__)
                middle = statistics.median_low(per_sample[rank] for rank in busy if rank != worst)
                found.append(((per_sample[worst] - middle) * samples[worst], worst, middle))
        lost_s, slowest, others = max(found, default=(0.0, 0, 0.0))
        if others == 0 or per_sample[slowest] < RATIO * others or lost_s < LOSS_SHARE * took_s:
            self._slow, self._times, self._next = None, 0, IN_A_ROW
            return None
        if self._slow != slowest:
            self._slow, self._times, self._next = slowest, 0, IN_A_ROW
        self._times += 1
        if self._times < self._next:
            return None
        self._next *= 2
        return (
            f"rank {slowest} on host {self._ranks[slowest][1]} is slow: its part of an update takes it "
            f"{1e3 * update_s[slowest]:.3g} ms, {per_sample[slowest] / others:.2g} times as long as the others need "
            "for as much, and they wait for it; if it stays so, give it less (--shares auto) or leave it out"
        )


def _places(parts: Sequence[int]) -> list[list[int]]:
    """The ranks by their place in their model group, which has the same part of the batch.

    Args:
        parts: that every rank has.
    """
    places = defaultdict(list)
    for rank, part in enumerate(parts):
        places[parts[:rank].count(part)].append(rank)
    return list(places.values())
