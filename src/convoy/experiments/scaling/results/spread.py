"""How much a median of a few visits can be trusted."""

import math
import statistics
from collections.abc import Sequence

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t at 97.5 % for 1, 2, … degrees of freedom."""
_EFFICIENCY = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, where values are normal and not too few."""


def repeatability(values: Sequence[float]) -> float | None:
    """What the medians of two series like this one differ by at most, in 95 of 100 cases (ISO 5725-6, 4.1.4).

    t · √2 · √(π/2) · s / √n, for the standard deviation s of n values; None of fewer than two.
    """
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    t = _T[freedom - 1] if freedom <= len(_T) else 1.96 + 2.4 / freedom
    return t * math.sqrt(2) * _EFFICIENCY * statistics.stdev(values) / math.sqrt(len(values))
