"""Random numbers as functions of (seed, step, layer, sample), the same on every device and in every order of calls.

A counter-based generator in the spirit of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011):
nothing is drawn in sequence, so a rank can compute just the samples, channels or rows that it owns. The mixing
function is the 32-bit integer hash "lowbias32", applied once under each half of a 64-bit key; it runs on CPU and GPU
with equal results.
"""

import zlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convoy.ops.gpu import triton_kernels
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
    """Keys of the samples of one step, by their positions in the global batch: int32 [samples, 2] on the CPU, the two
    halves of each sample's 64-bit key."""
    keys = mix(np.asarray(samples, dtype=np.uint64) * GOLDEN + word(fold(seed, step)))
    return torch.from_numpy(keys.astype("<u8").view("<i4").reshape(-1, 2))


def random_bits(keys: Tensor, layer: int, elements: int) -> Tensor:
    """Numbers uniform over all of int32, [samples, elements], for the first elements of each sample: `keys` are those
    of `sample_keys`, `layer` is that of `layer_key`. The bits of an element depend on its position alone, not on which
    others are asked for."""
    if _fused(keys):
        bits: Tensor = torch.ops.convoy.random_bits(keys, layer, elements)
        return bits
    return _first_bits(keys, layer, elements)


def drop(x: Tensor, keys: Tensor, layer: int, p: float, channels: bool = False, part: Tensor | None = None) -> Tensor:
    """Zero elements of `x`, [samples, ...], with probability `p`, or with `channels` whole channels, and scale the
    others up.

    `keys` and `layer` are as in `random_bits`; `part`, int32 [elements], or [channels] with `channels`, says where
    those of a sample of `x` are in the whole sample, and is None where `x` has all. They are numbered by dimension,
    whatever their order in memory.
    """
    if _fused(x):
        dropped: Tensor = torch.ops.convoy.drop(x, keys, layer, p, channels, part)
        return dropped
    return _drop(x, keys, layer, p, channels, part)


def threshold(p: float) -> int:
    """The number that uniform int32 bits are below with probability `p`."""
    return min(int(p * 2**32), 2**32 - 1) - 2**31


def scale(p: float) -> float:
    """The factor of elements that are not dropped."""
    return 0.0 if p == 1.0 else 1.0 / (1.0 - p)


def _fused(x: Tensor) -> bool:
    """Whether one operation does it all: the hash is some 25 launches on a GPU, unless it is compiled."""
    return x.device.type == "cuda" and not torch.compiler.is_compiling()


def _define(name: str, schema: str, by_torch: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
    def run(x: Tensor, *rest: Any) -> Tensor:
        kernels = _kernels(x) if x.is_floating_point() or name == "random_bits" else None
        result: Tensor = (by_torch if kernels is None else getattr(kernels, name))(x, *rest)
        return result

    torch.library.define(f"convoy::{name}", schema)
    torch.library.impl(f"convoy::{name}", "default", run)
    torch.library.register_fake(f"convoy::{name}", fake)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, keys, *ctx.options, part = inputs
    ctx.save_for_backward(keys, part)


def _drop_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of `drop`, whose mask is made once more, so that none is kept."""
    keys, part = ctx.saved_tensors
    return torch.ops.convoy.drop(gradient, keys, *ctx.options, part), None, None, None, None, None


def _kernels(x: Tensor) -> ModuleType | None:
    return triton_kernels("random_kernels", "dropout", x)


def _drop(x: Tensor, keys: Tensor, layer: int, p: float, channels: bool, part: Tensor | None) -> Tensor:
    shape = x.shape[:2] if channels else x.shape
    bits = _first_bits(keys, layer, shape[1:].numel()) if part is None else _bits(keys, layer, part)
    bits = bits.view(*shape, *[1] * (x.dim() - len(shape)))
    return x * ((bits >= threshold(p)).to(x.dtype) * scale(p))


def _first_bits(keys: Tensor, layer: int, elements: int) -> Tensor:
    return _bits(keys, layer, torch.arange(elements, dtype=torch.int32, device=keys.device))


def _bits(keys: Tensor, layer: int, elements: Tensor) -> Tensor:
    """The bits of elements at some positions in the whole sample, int32 [elements]."""
    counter = elements * STRIDE
    bits = counter[None, :] + keys[:, :1]
    bits = _mix(bits).bitwise_xor_(keys[:, 1:]).add_(layer)
    return _mix(bits)


def _mix(bits: Tensor) -> Tensor:
    """The hash, in place. Right shifts of int32 carry the sign along; the masks take it off."""
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= FIRST
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits *= SECOND
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


FIRST, SECOND = 0x7FEB352D, _signed(0x846CA68B)
STRIDE = _signed(int(GOLDEN) >> 32)  # an int of Python: torch.compile must not see that it comes from a number of numpy
_define(
    "drop",
    "(Tensor x, Tensor keys, int layer, float p, bool channels, Tensor? part) -> Tensor",
    _drop,
    lambda x, *_: torch.empty_like(x),
)
_define(
    "random_bits",
    "(Tensor keys, int layer, int elements) -> Tensor",
    _first_bits,
    lambda keys, _, elements: keys.new_empty(len(keys), elements),
)
torch.library.register_autograd("convoy::drop", _drop_gradient, setup_context=_keep)
