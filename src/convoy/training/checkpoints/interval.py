"""How often to save: Young's interval from what a checkpoint costs and how often something fails."""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from convoy.training.config.timespan import TimeSpan, in_words

_REMEMBERED = 5


@dataclass(frozen=True)
class Interval:
    """A decision.

    Attributes:
        updates: between two checkpoints.
        seconds: the same by the measured time of an update.
        sentence: with formula, numbers and source.
    """

    updates: int
    seconds: float
    sentence: str


@dataclass
class Young:
    """Derives the interval from measurements.

    Young, A first order approximation to the optimum checkpoint interval, 1974: with a checkpoint that costs C and a
    mean time M between failures, the least time is lost with sqrt(2 · C · M) between checkpoints. (Daly, 2006, adds
    terms that matter where C is not far below M.) Shorter than the time in which a checkpoint is written it cannot be.

    Attributes:
        mtbf: M.
        multiple: the interval is a multiple of so many updates.
    """

    mtbf: TimeSpan
    multiple: int = 1
    _costs: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def decide(self, cost_s: float, write_s: float, update_s: float) -> Interval:
        """Take one more measurement into account: the median of the last ones counts.

        Args:
            cost_s: what a checkpoint kept the run from its work.
            write_s: until it was on disk.
            update_s: the time of an update.
        """
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
