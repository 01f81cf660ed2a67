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

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def fold(*parts: int) -> int:
    """Mix integers into one 64-bit key (splitmix64 over the parts, in order)."""
    key = 0
    for part in parts:
        key = (key + (part & _MASK) + _GOLDEN) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key


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
    keys = np.asarray(samples, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(fold(seed, step))
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(31)
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
    counter = elements * _signed(_GOLDEN >> 32)
    bits = counter[None, :] + keys[:, :1]
    bits = _mix(bits).bitwise_xor_(keys[:, 1:]).add_(layer)
    return _mix(bits)


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
