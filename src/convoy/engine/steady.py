"""Measurements that are repeated until they are steady.

What runs for the first times is slower than it will be: code is loaded, and memory that the process has never had
comes from the kernel page by page, on virtual machines at the price of copying it several times. The C library needs
some rounds until its free blocks fit, so that a fixed number of rounds to warm up is either too small or a waste.
"""

import math
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def steady(
    measure: Callable[[], T],
    seconds: Callable[[T], float],
    agree: Callable[[bool], bool] = lambda done: done,
    *,
    enough: int = 3,
    within: float = 0.03,
    most: int = 10,
    patience_s: float = math.inf,
    settled: Callable[[], bool] = lambda: True,
) -> list[T]:
    """Measure until several measurements are near the fastest.

    Args:
        measure: takes one measurement.
        seconds: of a measurement.
        agree: whether all who measure together are done, when told whether this one is.
        enough: measurements near the fastest, itself included, that make an end.
        within: how near, as a part of the fastest.
        most: measurements after which it ends in any case.
        patience_s: seconds after which two measurements are enough: where each takes long, what disturbs one is small.
        settled: whether the last measurement was of a process that has what it needs; without that, two are not enough.

    Returns:
        The measurements near the fastest.
    """
    found: list[T] = []
    near: list[T] = []
    began = time.monotonic()
    for _ in range(most):
        found.append(measure())
        limit = (1 + within) * min(map(seconds, found))
        near = [one for one in found if seconds(one) <= limit]
        late = len(found) > 1 and settled() and time.monotonic() - began > patience_s
        if agree(late or len(near) >= enough):
            break
    return near
