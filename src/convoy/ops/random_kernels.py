# mypy: ignore-errors
"""The Triton kernel of `ops/random_bits.py`: the same bits as torch's operations, in int32 with wrap-around."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from convoy.ops.gpu import on_gpu
from convoy.ops.random_bits import FIRST, SECOND, STRIDE

BLOCK = 1024  # numbers that a program holds at a time
_FIRST = tl.constexpr(FIRST)
_SECOND = tl.constexpr(SECOND)
_STRIDE = tl.constexpr(STRIDE)


@triton.jit
def _mix(bits):
    """Right shifts of int32 carry the sign along; the masks take it off."""
    bits ^= (bits >> 16) & 0xFFFF
    bits *= _FIRST
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _SECOND
    bits ^= (bits >> 16) & 0xFFFF
    return bits


@triton.jit(do_not_specialize=["layer"])
def _random_bits(keys, layer, part, result, count, blocks, width: tl.constexpr):
    """A stretch of the elements of a sample: `result` [samples, count]."""
    sample = tl.program_id(0) // blocks
    i = tl.program_id(0) % blocks * width + tl.arange(0, width)
    mask = i < count
    element = i
    if part is not None:
        element = tl.load(part + i, mask=mask, other=0)
    bits = _mix(element * _STRIDE + tl.load(keys + 2 * sample))
    bits = _mix((bits ^ tl.load(keys + 2 * sample + 1)) + layer)
    tl.store(result + sample.to(tl.int64) * count + i, bits, mask=mask)


def try_out(device: torch.device) -> None:
    """Launch the kernel."""
    random_bits(torch.zeros(1, 2, dtype=torch.int32, device=device), 0, 1, None)


def random_bits(keys: Tensor, layer: int, elements: int, part: Tensor | None) -> Tensor:
    """`convoy::random_bits`."""
    bits = keys.new_empty(len(keys), elements)
    if bits.numel():
        width = min(BLOCK, triton.next_power_of_2(elements))
        blocks = triton.cdiv(elements, width)
        with on_gpu(keys.device):
            _random_bits[(len(keys) * blocks,)](keys, layer, part, bits, elements, blocks, width=width)
    return bits
