"""Random numbers that are a function of (seed, purpose, epoch, sample) and of nothing else.

The generator is SplitMix64 used as a counter-based one: a sample's numbers need no state, so any process can compute
them for any array of samples at once, in any order, and numpy's own generators (whose streams may change between
versions) are not involved.
"""

from enum import IntEnum
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from convoy.splitmix64 import GOLDEN, mix, word


class Purpose(IntEnum):
    """What numbers are drawn for. Each purpose has a stream of its own, so switching one on changes no other."""

    ORDER = 1
    SPLIT = 2
    CROP = 3
    FLIP = 4
    JITTER = 5
    PCA = 6
    RAND_AUGMENT = 7
    MIX = 8


def keys(seed: int, purpose: Purpose, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One 64-bit number for each sample [n]; different samples always get different numbers."""
    state = np.zeros(1, np.uint64)
    for part in (seed, purpose, epoch):
        state = mix((state + GOLDEN) ^ word(int(part)))
    return mix((state + GOLDEN) ^ samples.astype(np.uint64))


def uniforms(seed: int, purpose: Purpose, epoch: int, samples: NDArray[np.int64], num: int) -> NDArray[np.float64]:
    """`num` numbers in [0, 1) for each sample: [n, num]."""
    counters = np.arange(1, num + 1, dtype=np.uint64) * GOLDEN
    bits = mix(keys(seed, purpose, epoch, samples)[:, None] + counters)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normals(uniform: NDArray[np.float64]) -> list[float]:
    """Standard normal numbers from a row of uniform ones [n], by inversion."""
    inverse = NormalDist().inv_cdf
    return [inverse(max(u, 2.0**-54)) for u in uniform.tolist()]
