"""How fast each rank is: measured in the first updates for `--shares auto`, and watched for ranks that keep others."""

import socket
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from convoy.comm.ranks import Ranks
from convoy.training.division import Division, soonest

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
        ranks: whose speeds are compared.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks.gather((ranks.sample_rank, socket.gethostname()))
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


WARM_UP, MEASURED = 3, 5


@dataclass
class SpeedTest:
    """Takes the time of a rank's microbatches.

    Gradients are exchanged apart from it. What layers exchange is in it, so under plans that divide layers, or with
    batch norm over the global batch, ranks that wait for others look slower than they are.
    """

    updates: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether enough updates were seen."""
        return self.updates >= WARM_UP + MEASURED

    def add(self, seconds: float) -> None:
        """Count one update: what one microbatch took."""
        self.updates += 1
        if self.updates > WARM_UP:
            self.seconds.append(seconds)

    def shares(self, ranks: Ranks, division: Division) -> tuple[Division, list[float]]:
        """The division by which the slowest rank ends soonest; the same on every rank. All ranks call it.

        Returns:
            The division, and milliseconds that a microbatch takes each part of the batch.
        """
        median = sorted(self.seconds)[len(self.seconds) // 2]
        said = ranks.gather((ranks.sample_rank, median))
        times = [max(s for part, s in said if part == rank) for rank in range(ranks.num_sample_ranks)]
        if min(times) <= 0:  # a rank's only pass is the one that waits for the others
            return division, [1e3 * time for time in times]
        return Division(division.sizes, soonest(len(division.sizes), times)), [1e3 * time for time in times]
