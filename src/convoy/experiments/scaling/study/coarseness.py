"""Whether a batch has enough microbatches to be divided by the speeds of unequal devices."""

from collections.abc import Sequence

from convoy.experiments import formats
from convoy.training.ranks.division import soonest

GOAL = 0.98
"""Parts that let the devices reach so much of the sum of their speeds are fine enough."""


def reach(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """What devices with so many microbatches each do at most, as a part of the sum of their speeds."""
    slowest = max(count / speed for count, speed in zip(counts, speeds, strict=True))
    return sum(counts) / sum(speeds) / slowest


def best_reach(num: int, speeds: Sequence[float]) -> float:
    """The same of the best parts of so many microbatches; 0 where there are fewer than devices."""
    return reach(soonest(num, [1 / speed for speed in speeds]), speeds) if num >= len(speeds) else 0.0


def too_coarse(batch: int, num: int, speeds: Sequence[float]) -> str:
    """A sentence where microbatches are too few for parts by speed, and what to change; empty where they are not.

    Args:
        batch: samples of an update.
        num: microbatches that it has.
        speeds: of the devices, in any unit.
    """
    now = best_reach(num, speeds)
    if now >= GOAL:
        return ""
    said = (
        f"A batch of {batch} in {formats.plural(num, 'microbatch', 'microbatches')} lets devices of speed "
        f"{' : '.join(formats.significant(speed / max(speeds), 2) for speed in speeds)} reach "
        f"{formats.percent(now, 0)} of the sum of their speeds at most"
    )
    finer = next((more for more in range(num + 1, batch + 1) if best_reach(more, speeds) >= GOAL), None)
    if finer is None:
        return f"{said}: raise --batch."
    return (
        f"{said}; --set microbatches={finer} allows {formats.percent(best_reach(finer, speeds), 0)} (another "
        "experiment only where batch norm takes its statistics over microbatches)."
    )
