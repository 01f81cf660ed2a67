"""Where a tensor lies for every state of the variables that decide about it, as an array of numbers of layouts."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from convoy.search.elimination import Scope

Ids = NDArray[np.int64]
"""Numbers of layouts, as `convoy.search.prices.Prices.number` gives them."""

_LARGE = 50_000


@dataclass(frozen=True)
class Known:
    """Where a tensor lies, for every state of the variables in `scope`.

    Attributes:
        ids: numbers of layouts, one dimension for each variable.
        key: the same for equal `ids`.
    """

    scope: Scope
    ids: Ids
    key: int


class Keys:
    """Numbers for arrays, so that what was worked out for one serves all that are equal."""

    def __init__(self) -> None:
        self._large = 0
        self._known: dict[tuple[tuple[int, ...], bytes], int] = {}

    def of(self, ids: Ids) -> int:
        """The same number for equal arrays; large ones are taken to be all different."""
        if ids.size > _LARGE:
            self._large += 1
            return -self._large
        return self._known.setdefault((ids.shape, ids.tobytes()), len(self._known))


def relabelled(ids: Ids) -> tuple[Ids, Ids]:
    """The distinct numbers of an array, ascending, and for every element the place of its number among them.

    As `numpy.unique`, without sorting where the numbers are small.
    """
    if ids.size == 1:
        return ids.reshape(1), np.zeros_like(ids)
    if ids.size >= 64:
        low, high = int(ids.min()), int(ids.max())
        if high - low <= 4 * ids.size:
            shifted = ids - low
            seen = np.zeros(high - low + 1, bool)
            seen[shifted] = True
            return np.flatnonzero(seen) + low, (np.cumsum(seen) - 1)[shifted]
    numbers, places = np.unique(ids, return_inverse=True)
    return numbers, places.reshape(ids.shape)


def narrowed(ids: Ids) -> tuple[tuple[int, ...], Ids]:
    """An array without the dimensions along which it does not change, and the places of those that are left."""
    places = list(range(ids.ndim))
    for axis in reversed(range(ids.ndim)):
        first = ids.take([0], axis=axis)
        if ids.shape[axis] == 1 or (ids == first).all():
            ids = first.squeeze(axis)
            places.pop(axis)
    return tuple(places), ids.copy(order="C")
