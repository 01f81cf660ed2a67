"""When a checkpoint is due: every so many updates, or as was measured."""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from convoy.comm.ranks import Ranks
from convoy.training.config import TimeSpan, in_words

# The first checkpoint of a process comes after this many updates at most: those by which predictions are checked are
# before it.
FIRST_UPDATES = 65
FIRST_S = 30.0  # the same in seconds: the first one shows what a checkpoint costs, and whether it can be written at all
_REMEMBERED = 5


class Pace:
    """The time of an update on this rank, with evaluations and without checkpoints, from the second update on."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._began = 0.0
        self._waited_s = 0.0
        self._done = 0

    def updated(self, done: int) -> None:
        """`done` updates are done."""
        self._done = done
        if self._first is None:
            self._first, self._began = done, time.perf_counter()

    def waited(self, seconds: float) -> None:
        """The run was kept by a checkpoint."""
        if self._first is not None:
            self._waited_s += seconds

    @property
    def update_s(self) -> float:
        """Seconds; 0 while nothing is known."""
        if self._first is None or self._done == self._first:
            return 0.0
        return max(1e-6, (time.perf_counter() - self._began - self._waited_s) / (self._done - self._first))


class CheckpointSchedule(ABC):
    """Says after which updates the state is saved, the same on all ranks."""

    @abstractmethod
    def due(self, done: int, pace: Pace) -> bool:
        """Whether a checkpoint is due after so many updates. All ranks call it after every update."""

    def saved(self, step: int) -> None:  # noqa: B027 -- not all need to know
        """One was begun, due or not."""

    def measured(self, step: int, cost_s: float, write_s: float, update_s: float) -> str | None:
        """One is on disk: seconds that it kept the run from its work, until it was written, and of an update (0: not
        known yet); the same numbers on all ranks. Gives a sentence where there is something new to say.
        """
        return None


class Every(CheckpointSchedule):
    """Every so many updates, at least 1."""

    def __init__(self, updates: int) -> None:
        self._updates = updates

    def due(self, done: int, pace: Pace) -> bool:
        return done % self._updates == 0


@dataclass(frozen=True)
class Interval:
    """The updates between two checkpoints, and the seconds by the measured time of an update."""

    updates: int
    seconds: float
    sentence: str  # with formula, numbers and source


@dataclass
class Young:
    """Derives the interval from what checkpoints cost.

    Young, A first order approximation to the optimum checkpoint interval, 1974: with a checkpoint that costs C and a
    mean time M between failures, the least time is lost with sqrt(2 · C · M) between checkpoints. (Daly, 2006, adds
    terms that matter where C is not far below M.) Shorter than the time in which a checkpoint is written it cannot be.
    """

    mtbf: TimeSpan  # M of the formula
    multiple: int = 1  # the interval is a multiple of so many updates
    _costs: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def decide(self, cost_s: float, write_s: float, update_s: float) -> Interval:
        """Take one more measurement into account: the median of the last ones counts."""
        self._costs.append(max(cost_s, 1e-6))
        cost, update_s = median(self._costs), max(update_s, 1e-6)
        young = math.sqrt(2 * cost * self.mtbf.seconds)
        updates = max(1, round(max(young, write_s) / update_s))
        updates = math.ceil(updates / self.multiple) * self.multiple
        seconds = updates * update_s
        formula = f"sqrt(2 · {in_words(cost)} · {in_words(self.mtbf.seconds)}), Young 1974"
        if write_s > young:
            formula = f"as long as one takes to be written, more than {formula}"
        return Interval(
            updates,
            seconds,
            f"checkpoint every {updates:,} update{'s' if updates > 1 else ''} ({in_words(seconds)}): {formula}; "
            f"at most {in_words(seconds + write_s)} of work are lost",
        )


class Automatic(CheckpointSchedule):
    """At Young's interval after the one before; the first one soon, to measure what a checkpoint costs. The ranks
    follow the clock of rank 0.
    """

    def __init__(self, young: Young, ranks: Ranks) -> None:
        self._young = young
        self._ranks = ranks
        self._calls = 0
        self._next: int | None = None
        self._last = 0
        self._interval: Interval | None = None
        self._said = 0

    def due(self, done: int, pace: Pace) -> bool:
        self._calls += 1
        if self._calls == 2 and self._next is None:
            updates = min(FIRST_UPDATES, max(2, int(FIRST_S / pace.update_s)))
            (updates,) = self._ranks.largest(updates if self._ranks.rank == 0 else 0)
            self._next = self._rounded(done + updates - 2)
        return self._next is not None and done >= self._next

    def saved(self, step: int) -> None:
        self._last = step
        if self._interval is not None:
            self._next = self._rounded(step + self._interval.updates)
        else:
            self._next = None if self._next is None else self._rounded(step + FIRST_UPDATES)

    def measured(self, step: int, cost_s: float, write_s: float, update_s: float) -> str | None:
        """Derive the interval; it is said at first, and where it has changed to half or double of that."""
        if update_s == 0:
            return None
        self._interval = self._young.decide(cost_s, write_s, update_s)
        self._next = self._rounded(self._last + self._interval.updates)
        if self._said and 0.5 < self._interval.updates / self._said < 2:
            return None
        self._said = self._interval.updates
        return self._interval.sentence

    def _rounded(self, step: int) -> int:
        multiple = self._young.multiple
        return -(-step // multiple) * multiple
