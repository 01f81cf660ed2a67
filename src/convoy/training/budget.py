"""The time in which the doctor answers: one budget of seconds, of which each part of its work gets a share."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from convoy.comm.ranks import Ranks

Say = Callable[[str, int, int], None]


@dataclass
class Budget:
    """Seconds for the work of all ranks. The clock of rank 0 counts."""

    ranks: Ranks
    seconds: float = math.inf
    began: float = field(default_factory=lambda: time.perf_counter())  # by `time.perf_counter`
    say: Say = lambda *work: None  # told of the work: what, and how many of the seconds have passed
    missed: list[str] = field(default_factory=list)  # what there was no time for

    @property
    def left(self) -> float:
        """Seconds until the end, by the clock of this rank."""
        return max(0.0, self.began + self.seconds - time.perf_counter())

    def part(self, share: float) -> "Budget":
        """A share of what is left, from now on."""
        return Budget(self.ranks, share * self.left, missed=self.missed)

    def allows(self, seconds: float, what: str | None = None) -> bool:
        """Whether there are `seconds` left; if not, `what` is kept as missed. All ranks call it, and are told the
        same.
        """
        fits = self.ranks.broadcast(seconds <= self.left)
        if not fits and what is not None and what not in self.missed:
            self.missed.append(what)
        return fits

    def tell(self, what: str) -> None:
        """Say what is done now."""
        if math.isfinite(self.seconds):
            total = max(1, math.ceil(self.seconds))
            self.say(f"{what}, seconds", min(int(self.seconds - self.left), total - 1), total)
