"""The gradient noise scale of a run (McCandlish et al., 2018): up to about which batch more samples an update help.

The expected squared norm of the mean gradient of B samples is |G|² + tr Σ / B. From those of one microbatch and of the
whole batch follow both unknowns without bias (appendix A.1), and from their averages the scale tr Σ / |G|², in samples.
"""

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from convoy.training.division import Division

# A pass of one microbatch takes longer than its part of a merged one, and one that is not replayed longer still.
_SHARE, _SLOWER, _NOT_REPLAYED = 0.01, 2, 5
_KEPT = 0.9  # of both averages at each sampled update: they are of about the last ten


def estimate(small: float, big: float, samples: int, batch: int) -> tuple[float, float]:
    """|G|² and tr Σ from the squared norms of the mean gradients of some samples and of a batch."""
    return (batch * big - samples * small) / (batch - samples), (small - big) / (1 / samples - 1 / batch)


def noise_scale(averages: Mapping[str, float]) -> float | None:
    """The scale in samples; None where nothing was sampled yet, or noise hides the gradient."""
    squared, variance = averages.get("gradient_squared", 0.0), averages.get("gradient_variance", 0.0)
    return variance / squared if squared > 0 and variance > 0 else None


def interval(division: Division, num_stages: int, replayed: bool) -> int:
    """Every how many updates one is sampled, so that a pass of one microbatch, for which all devices wait, takes a
    hundredth of the time at most. Of LeNet on a CPU it took a quarter of an update of 16, hence a floor of 50."""
    updates = _SLOWER * len(division.counts) * num_stages / len(division.sizes)  # as long as such a pass
    return max(50, math.ceil(updates / _SHARE)) * (_NOT_REPLAYED if replayed else 1)


@dataclass
class GradientNoise:
    """In which updates the gradient of the first microbatch is measured alone, and the averages of what follows. The
    microbatch has the same samples on any number of devices; others take part in its pass with none."""

    every: int  # updates from one that is sampled to the next; 0 samples none
    division: Division  # of the batch
    averages: MutableMapping[str, float]  # kept over a stop

    def due(self, update: int) -> bool:
        """Whether an update, counted from 0, is sampled."""
        return self.every > 0 and update % self.every == self.every // 2

    @property
    def one(self) -> Division:
        """The first microbatch alone."""
        return Division(self.division.sizes[:1], (1, *(0 for _ in self.division.counts[1:])))

    def add(self, small: float, big: float) -> None:
        """Take the squared norms of the microbatch's and the batch's mean gradient into account."""
        if math.isfinite(small) and math.isfinite(big):
            sizes = self.division.sizes
            numbers = estimate(small, big, sizes[0], sum(sizes))
            for name, number in zip(("gradient_squared", "gradient_variance"), numbers, strict=True):
                self.averages[name] = _KEPT * self.averages.get(name, number) + (1 - _KEPT) * number
