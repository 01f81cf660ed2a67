# mypy: ignore-errors
"""Triton kernels of `ops/random_bits.py`: the same bits as torch's operations, in int32 with wrap-around."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from convoy.ops.gpu import on_its_gpu
from convoy.ops.random_bits import FIRST, SECOND, STRIDE, scale, threshold

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


@triton.jit(do_not_specialize=["layer", "bound"])
def _drop(
    x, y, keys, layer, part, bound, count, channels, positions, blocks,
    kept: tl.constexpr, inner: tl.constexpr, by_channel: tl.constexpr, width: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """A stretch of a sample, which is [channels, positions] with the channels innermost in memory (`inner`) or not."""
    sample = tl.program_id(0) // blocks
    i = tl.program_id(0) % blocks * width + tl.arange(0, width)
    there = i < count
    element = i
    if inner:
        element = i % channels
        if not by_channel:
            element = element * positions + i // channels
    elif by_channel:
        element = i // positions
    if part is not None:
        element = tl.load(part + element, mask=there, other=0)
    bits = _mix(element * _STRIDE + tl.load(keys + 2 * sample))
    bits = _mix((bits ^ tl.load(keys + 2 * sample + 1)) + layer)
    factor = tl.where(bits >= bound, tl.full([width], kept, dtype), tl.zeros([width], dtype))
    at = sample.to(tl.int64) * count + i
    tl.store(y + at, tl.load(x + at, mask=there, other=0.0).to(dtype) * factor, mask=there)


@triton.jit(do_not_specialize=["layer"])
def _random_bits(keys, layer, found, count, blocks, width: tl.constexpr):
    """A stretch of the first elements of a sample: `found` [samples, count]."""
    sample = tl.program_id(0) // blocks
    i = tl.program_id(0) % blocks * width + tl.arange(0, width)
    bits = _mix(i * _STRIDE + tl.load(keys + 2 * sample))
    bits = _mix((bits ^ tl.load(keys + 2 * sample + 1)) + layer)
    tl.store(found + sample.to(tl.int64) * count + i, bits, mask=i < count)


def try_out(device: torch.device) -> None:
    """Launch a kernel."""
    drop(torch.zeros(1, 1, device=device), torch.zeros(1, 2, dtype=torch.int32, device=device), 0, 0.5, False, None)


def drop(x: Tensor, keys: Tensor, layer: int, p: float, channels: bool, part: Tensor | None) -> Tensor:
    """`convoy::drop`."""
    inner = x.dim() > 2 and not x.is_contiguous() and x.movedim(1, -1).is_contiguous()
    x = x if inner else x.contiguous()
    y = torch.empty_like(x)
    if not x.numel():
        return y
    count = x[0].numel()
    width = min(BLOCK, triton.next_power_of_2(count))
    blocks = triton.cdiv(count, width)
    num_channels = x.shape[1] if x.dim() > 1 else 1
    options = {
        "kept": _rounded(scale(p), x.dtype),
        "inner": inner,
        "by_channel": channels,
        "width": width,
        "dtype": tl.float64 if x.dtype == torch.float64 else tl.float32,
    }
    shape = count, num_channels, count // num_channels
    with on_its_gpu(x):
        _drop[(len(x) * blocks,)](x, y, keys, layer, part, threshold(p), *shape, blocks, **options)
    return y


def random_bits(keys: Tensor, layer: int, elements: int) -> Tensor:
    """`convoy::random_bits`."""
    bits = keys.new_empty(len(keys), elements)
    if bits.numel():
        width = min(BLOCK, triton.next_power_of_2(elements))
        blocks = triton.cdiv(elements, width)
        with on_its_gpu(keys):
            _random_bits[(len(keys) * blocks,)](keys, layer, bits, elements, blocks, width=width)
    return bits


@functools.cache
def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=dtype).item()
