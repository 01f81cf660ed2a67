"""Whether a batch has enough microbatches to be divided by the speeds of unequal devices."""

from collections.abc import Sequence

from convoy.experiments import formats
from convoy.training.division import soonest

GOAL = 0.97
"""Parts that let the devices reach so much of the sum of their speeds are fine enough."""


def reach(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """What devices with so many microbatches each do at most, as a part of the sum of their speeds."""
    slowest = max(count / speed for count, speed in zip(counts, speeds, strict=True))
    return sum(counts) / sum(speeds) / slowest


def best_reach(batch: int, microbatch: int, speeds: Sequence[float]) -> float:
    """The same of the best parts that there are; 0 where there are fewer microbatches than devices."""
    num = -(-batch // microbatch)
    return reach(soonest(num, [1 / speed for speed in speeds]), speeds) if num >= len(speeds) else 0.0


def too_coarse(batch: int, microbatch: int, speeds: Sequence[float]) -> str:
    """A sentence where microbatches are too few for parts by speed, and what to change; empty where they are not.

    Args:
        batch: samples of an update.
        microbatch: samples of a microbatch, at most.
        speeds: of the devices, in any unit.
    """
    now = best_reach(batch, microbatch, speeds)
    if now >= GOAL:
        return ""
    said = (
        f"A batch of {batch} in microbatches of {microbatch} lets devices of speed "
        f"{' : '.join(formats.significant(speed / max(speeds), 2) for speed in speeds)} reach "
        f"{formats.percent(now, 0)} of the sum of their speeds at most"
    )
    finer = next((size for size in range(microbatch - 1, 0, -1) if best_reach(batch, size, speeds) >= GOAL), None)
    if finer is None:
        return f"{said}: raise --batch."
    return (
        f"{said}; --set microbatch={finer} allows {formats.percent(best_reach(batch, finer, speeds), 0)} (another "
        "experiment only where batch norm takes its statistics over microbatches)."
    )
