"""SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), used as a hash of counters."""

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The generator's output function, a bijection of 64-bit numbers: every bit depends on all bits. Any shape."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def word(number: int) -> NDArray[np.uint64]:
    """The lowest 64 bits of an integer of any size or sign: [1], as arithmetic on arrays wraps around in silence."""
    return np.array([number & 2**64 - 1], np.uint64)
