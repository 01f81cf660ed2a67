"""The gradient noise scale of a run (McCandlish et al., 2018): up to about which batch more samples an update help.

The expected squared norm of the mean gradient of B samples is |G|² + tr Σ / B. From those of one microbatch and of the
whole batch follow both unknowns without bias (appendix A.1), and from their averages the scale tr Σ / |G|², in samples.
"""

import math
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from convoy.data import Batch
from convoy.engine.uncaptured import Uncaptured
from convoy.training.build import has_batch_norm
from convoy.training.division import Division
from convoy.training.gradients import FiniteGuard

if TYPE_CHECKING:
    from convoy.training.session import Session
    from convoy.training.step import TrainingStep

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


def why_not(session: "Session") -> str:
    """Why the noise scale cannot be measured; empty where it can."""
    recipe = session.recipe
    if not recipe.noise_scale:
        return "as said"
    if len(session.division.sizes) < 2:
        return "an update is one microbatch, and it takes two: lower --microbatch"
    if recipe.batch_norm != "microbatch" and has_batch_norm(session.model):
        return f"batch_norm={recipe.batch_norm} lets the samples of all microbatches depend on each other"
    if recipe.parallel.local_sgd is not None:
        return "with local_sgd devices have other weights than each other"
    if recipe.compile or isinstance(session.network, Uncaptured):
        return "one microbatch alone would be another program of this network"
    return ""


def interval(session: "Session") -> int:
    """Every how many updates one is sampled: a pass of one microbatch takes at most a hundredth of the time."""
    parts = len(session.division.counts) * session.plan.num_stages  # that have nothing else to do meanwhile
    updates = _SLOWER * parts / len(session.division.sizes) / _SHARE
    return max(10, math.ceil(updates) * (_NOT_REPLAYED if session.is_recorded else 1))


class GradientNoise:
    """Measures in some updates the gradient of the first microbatch alone, by a pass that changes nothing, beside that
    of the batch, and keeps `averages` of what follows. All ranks make the same calls.

    The microbatch is the same samples on any number of devices; others take part in the pass with none.
    """

    def __init__(self, session: "Session", averages: MutableMapping[str, float]) -> None:
        self._session, self.averages = session, averages
        self._every = 0 if why_not(session) else interval(session)
        self._small = math.nan

    def due(self, update: int) -> bool:
        """Whether an update, counted from 0, is sampled."""
        return self._every > 0 and update % self._every == self._every // 2

    def before(self, step: "TrainingStep", batch: Batch, update: int) -> None:
        """The update begins: measure the gradient of one microbatch, and leave everything as it was."""
        division, passes = self._session.division, step.passes
        guard = FiniteGuard(step.network, self._session.ranks, gradients=False)
        guard.begin()
        one = Division(division.sizes[:1], (1, *(0 for _ in division.counts[1:])))
        step.passes = one.passes(1)
        step.exchange.divide(one, 1)
        step.whole_gradient(batch, update, replays=False)
        self._small = self._squared_norm(step) * (step.num_samples / one.sizes[0]) ** 2
        guard.restore()
        step.optimizer.zero_grad(set_to_none=True)
        step.passes = passes
        step.exchange.divide(division, len(passes))

    def after(self, step: "TrainingStep") -> None:
        """The gradient of the whole batch is there."""
        big, samples = self._squared_norm(step), self._session.division.sizes[0]
        if math.isfinite(big) and math.isfinite(self._small):
            numbers = estimate(self._small, big, samples, step.num_samples)
            for name, number in zip(("gradient_squared", "gradient_variance"), numbers, strict=True):
                self.averages[name] = _KEPT * self.averages.get(name, number) + (1 - _KEPT) * number

    def _squared_norm(self, step: "TrainingStep") -> float:
        scale = step.scaler.get_scale() if step.scaler.is_enabled() else 1.0
        return (float(step.exchange.norm()) / scale) ** 2
