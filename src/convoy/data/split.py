"""A seeded split for data that has none of its own: the same share of every class is held out."""

import numpy as np
from numpy.typing import NDArray

from convoy.data.randomness import Purpose, keys


def stratified_split(
    labels: NDArray[np.int64], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices to train on and to hold out, both ascending; at least one sample in each.

    Samples are lined up class by class, shuffled within a class, and every (1/fraction)-th is held out. So the
    number held out is exact, and a class of n samples gives n·fraction of them, rounded up or down.
    """
    num = len(labels)
    num_test = min(max(round(num * fraction), 1), num - 1)
    line = np.lexsort((keys(seed, Purpose.SPLIT, 0, np.arange(num)), labels))
    place = np.arange(num, dtype=np.int64)
    held_out = (place + 1) * num_test // num > place * num_test // num
    return np.sort(line[~held_out]), np.sort(line[held_out])
