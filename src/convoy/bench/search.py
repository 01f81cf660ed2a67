"""Which learning rate is best at a batch: factors of two around a first guess until the best is inside, then the middle
between it and its better neighbor; and what a batch gains over smaller ones.

Rates are places on a scale of half octaves, the guess at 0. What is compared is the number of updates to the target;
where none reaches it, how near it came.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

# Smaller is better: (0, updates) of a training that reached the target, (1, test error) of one that did not, and
# (2, rate) of one that failed, so that rates that are too high lead to lower ones.
Score = tuple[int, float]

FIRST = (0, 2, -2)  # twice and half the guess
FARTHEST = 14  # half octaves: a factor of 128 either way
LEAST, USUAL = 4, 6  # rates of a search, at least and usually: the first three, one or three octaves more, the middle


def next_rates(scores: Mapping[int, Score]) -> list[int]:
    """The places of rates to be tried next; none where the best is found."""
    missing = [place for place in FIRST if place not in scores]
    if missing:
        return missing
    octaves = {place: score for place, score in scores.items() if place % 2 == 0}
    best = min(octaves, key=lambda place: (octaves[place], place))
    outside = [place for place in (best - 2, best + 2) if place not in octaves and abs(place) <= FARTHEST]
    if outside:
        return outside
    neighbors = [place for place in (best - 2, best + 2) if place in octaves]
    middle = (best + min(neighbors, key=lambda place: (octaves[place], place))) // 2
    return [] if middle in scores else [middle]


def rate_at(guess: float, place: int) -> float:
    """A rate, to four digits."""
    return float(f"{guess * 2 ** (place / 2):.4g}")


PERFECT, DIMINISHING, NONE = "perfect scaling", "diminishing returns", "no gain"
# Slopes of log(updates) over log(batch): -1 where twice the batch needs half the updates, 0 where it needs as many.
_STEEP, _FLAT = -0.75, -0.25


def regimes(batches: Sequence[int], updates: Sequence[float]) -> list[str]:
    """The regime in which each batch after the first lies (Shallue et al., 2019, section 4.1), by the slope from the
    one before it; the first has that of the second. No regime comes back once it is left: a steeper slope behind a flat
    one is noise."""
    order = (PERFECT, DIMINISHING, NONE)
    latest, names = 0, list[str]()
    for (small, more), (large, fewer) in pairwise(zip(batches, updates, strict=True)):
        slope = math.log(fewer / more) / math.log(large / small)
        latest = max(latest, 0 if slope <= _STEEP else 1 if slope <= _FLAT else 2)
        names.append(order[latest])
    return [*names[:1], *names]
