"""Random numbers as functions of (seed, step, layer, sample), the same on every device and in every order of calls.

A counter-based generator in the spirit of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011):
nothing is drawn in sequence, so a rank can compute just the samples, channels or rows that it owns. The mixing
function is the 32-bit integer hash "lowbias32", applied once under each half of a 64-bit key; it runs on CPU and GPU
with equal results.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from convoy.splitmix64 import GOLDEN, mix, word


def fold(*parts: int) -> int:
    """Mix integers into one 64-bit key (splitmix64 over the parts, in order)."""
    key = word(0)
    for part in parts:
        key = mix(key + word(part) + GOLDEN)
    return int(key[0])


def layer_key(name: str) -> int:
    """The 32-bit key of a layer: a checksum of its qualified name, so it survives changes elsewhere in the network."""
    return _signed(zlib.crc32(name.encode()))


def sample_keys(seed: int, step: int, samples: Sequence[int]) -> Tensor:
    """Keys of the samples of one step.

    Args:
        seed: the run's seed.
        step: number of the weight update.
        samples: positions in the global batch.

    Returns:
        int32 [samples, 2] on the CPU: the two halves of each sample's 64-bit key.
    """
    keys = mix(np.asarray(samples, dtype=np.uint64) * GOLDEN + word(fold(seed, step)))
    return torch.from_numpy(keys.astype("<u8").view("<i4").reshape(-1, 2))


def random_bits(keys: Tensor, layer: int, elements: int | Tensor) -> Tensor:
    """Uniform 32-bit numbers for some elements of each sample.

    Args:
        keys: int32 [samples, 2] from `sample_keys`.
        layer: key of the layer, from `layer_key`.
        elements: int32 [elements], their positions in the whole sample; a number stands for so many from the first.
            The bits of an element depend on its position alone, not on which others are asked for.

    Returns:
        int32 [samples, elements], uniform over all of int32.
    """
    if isinstance(elements, int):
        elements = torch.arange(elements, dtype=torch.int32, device=keys.device)
    counter = elements * _STRIDE
    bits = counter[None, :] + keys[:, :1]
    bits = _mix(bits).bitwise_xor_(keys[:, 1:]).add_(layer)
    return _mix(bits)


def one_for_each(keys: Tensor, layers: Tensor) -> Tensor:
    """What `random_bits` gives for the first element of each sample, for many layers at once.

    Args:
        keys: int32 [samples, 2] from `sample_keys`.
        layers: int32 [layers], their keys.

    Returns:
        int32 [layers, samples].
    """
    bits = _mix(keys[:, 0].clone()).bitwise_xor_(keys[:, 1])
    return _mix(bits + layers[:, None])


def _mix(bits: Tensor) -> Tensor:
    """The hash, in place. Right shifts of int32 carry the sign along; the masks take it off."""
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= 0x7FEB352D
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= _signed(0x846CA68B)
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


_STRIDE = _signed(int(GOLDEN) >> 32)
"""What torch.compile shall not see is made of a number of numpy's."""


def threshold(p: float) -> int:
    """The number that uniform int32 bits are below with probability `p`."""
    return min(int(p * 2**32), 2**32 - 1) - 2**31
