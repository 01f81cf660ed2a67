# mypy: ignore-errors
"""Batch norm by Triton kernels: the four functions of `batch_norm_torch.py`, of all microbatches at once.

An activation is [samples, channels, positions], with the channels innermost in memory (`inner`) or the positions. The
numbers of a channel in a microbatch are its rows; a program computes a stretch of rows of some channels, `height` times
`width` numbers at a time. A microbatch has too few channels to fill a GPU with them alone, so that its sums are those
of many stretches, in groups: the last program of a group to be done adds up the group (Chan, Golub and LeVeque, 1979),
and the last group to be done all groups, always in the same order. A layer takes two launches forward, moments and
normalization, and two backward, sums and the input's gradient.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from convoy.ops.batch_norm_torch import Norm, Saved, combined
from convoy.ops.gpu import Constants, Launch, counters
from convoy.ops.statistics import Running

PROGRAMS = 1024  # about as many as fill a GPU several times
TILE = 2048  # numbers that a program holds at a time
LANES = 1024  # numbers of parts that it adds up at a time
# parts of a microbatch, on as many ranks, up to which every program of a normalization combines them for itself
MANY = 64
# arguments whose values need no kernel of their own, which would have to be built
UNLIKE = ("splits", "groups", "parts", "stride", "number")


@triton.jit
def _stretch(starts, positions, splits, height: tl.constexpr):
    """This program's microbatch, its first sample and number of rows; where the stretch of rows begins and ends."""
    m = tl.program_id(0) // splits
    start = tl.load(starts + m)
    rows = ((tl.load(starts + m + 1) - start) * positions).to(tl.int32)
    length = tl.cdiv(tl.cdiv(rows, splits), height) * height
    begin = tl.program_id(0) % splits * length
    return m.to(tl.int64), start, rows, begin, tl.minimum(begin + length, rows)


@triton.jit
def _offsets(start, r, c, channels, positions, inner: tl.constexpr):
    """Where rows [height] of channels [width] of the microbatch that begins at a sample lie."""
    r = r.to(tl.int64)
    if inner:
        return (start * positions + r)[:, None] * channels + c[None, :]
    sample = r // positions
    at_row = (start + sample) * channels * positions + (r - sample * positions)
    return at_row[:, None] + c[None, :].to(tl.int64) * positions


@triton.jit
def _group(splits, groups):
    """Of this program: its stretch, its group, the first stretch of the group and how many it has."""
    k = tl.program_id(0) % splits
    size = tl.cdiv(splits, groups)
    g = k // size
    return k, g, g * size, tl.minimum(size, splits - g * size)


@triton.jit
def _is_last(counters, splits, groups, slot, number):
    """Whether the other programs, `number` with this one, have come here, so that all they wrote is to be seen; the
    counter is then as it was. A microbatch and block of channels has one for each group and one for the groups."""
    at = (tl.program_id(0) // splits * (groups + 1) + slot) * tl.num_programs(1) + tl.program_id(1)
    tl.debug_barrier()  # all threads of this program have written what its first thread now announces
    last = tl.atomic_add(counters + at, 1, sem="acq_rel", scope="gpu") == number - 1
    if last:
        tl.store(counters + at, 0)
    return last


@triton.jit
def _combined(
    parts, number, stride, c, channels,
    rows: tl.constexpr, lanes: tl.constexpr, width: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """What parts, [rows, channels] each and `stride` apart, are together for channels [width]: of three rows count,
    mean and sum of squared deviations, of two the sums of both."""
    first = tl.zeros([lanes, width], dtype)
    second = tl.zeros([lanes, width], dtype)
    third = tl.zeros([lanes, width], dtype)
    for begin in range(0, number, lanes):
        k = begin + tl.arange(0, lanes)
        mask = (k < number)[:, None] & (c < channels)[None, :]
        at = parts + k[:, None] * stride + c[None, :]
        part_first = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        value = tl.load(at + channels, mask=mask, other=0.0, cache_modifier=".cg")
        if rows == 3:
            delta = value - second
            total = tl.maximum(first + part_first, 1.0)
            second += delta * (part_first / total)
            third += tl.load(at + 2 * channels, mask=mask, other=0.0, cache_modifier=".cg")
            third += delta * delta * (first * part_first / total)
        else:
            second += value
        first += part_first
    return _joined(first, second, third, rows)


@triton.jit
def _joined(first, second, third, rows: tl.constexpr):
    """The same of all lanes together: [lanes, width] to [width]."""
    whole = tl.sum(first, 0)
    if rows == 3:
        mean = tl.sum(second * first, 0) / tl.maximum(whole, 1.0)
        deviation = second - mean[None, :]
        return whole, mean, tl.sum(third + first * deviation * deviation, 0)
    return whole, tl.sum(second, 0), tl.sum(third, 0)


@triton.jit
def _store(at, first, second, third, c, channels, rows: tl.constexpr):
    tl.store(at + c, first, mask=c < channels)
    tl.store(at + channels + c, second, mask=c < channels)
    if rows == 3:
        tl.store(at + 2 * channels + c, third, mask=c < channels)


@triton.jit
def _finish(
    first, second, third, partial, result, copy, counters, splits, groups, c, channels,
    rows: tl.constexpr, lanes: tl.constexpr, width: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Put together what the programs of a microbatch have found of channels [width]: those of stretches and then of
    groups of them, `partial` [microbatches, splits + groups, rows, channels], to `result` [microbatches, rows,
    channels], and its copy if wanted."""
    m = (tl.program_id(0) // splits).to(tl.int64)
    size = rows * channels
    parts = partial + m * (splits + groups) * size
    k, g, begin, length = _group(splits, groups)
    _store(parts + k * size, first, second, third, c, channels, rows)
    if _is_last(counters, splits, groups, g, length):
        a1, b1, c1 = _combined(parts + begin * size, length, size, c, channels, rows, lanes, width, dtype)
        if groups == 1:
            _store(result + m * size, a1, b1, c1, c, channels, rows)
            if copy is not None:
                _store(copy + m * size, a1, b1, c1, c, channels, rows)
        else:
            top = parts + splits * size
            _store(top + g * size, a1, b1, c1, c, channels, rows)
            if _is_last(counters, splits, groups, groups, groups):
                a2, b2, c2 = _combined(top, groups, size, c, channels, rows, lanes, width, dtype)
                _store(result + m * size, a2, b2, c2, c, channels, rows)
                if copy is not None:
                    _store(copy + m * size, a2, b2, c2, c, channels, rows)


@triton.jit(do_not_specialize=UNLIKE)
def _moments(
    x, starts, counters, partial, moments, channels, positions, splits, groups,
    inner: tl.constexpr, height: tl.constexpr, width: tl.constexpr, lanes: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Count, mean and sum of squared deviations of microbatches: [microbatches, 3, channels]."""
    _, start, _, begin, end = _stretch(starts, positions, splits, height)
    c = tl.program_id(1) * width + tl.arange(0, width)
    lane = tl.arange(0, height)
    mean = tl.zeros([height, width], dtype)
    square = tl.zeros([height, width], dtype)
    step = 0
    for first in range(begin, end, height):
        step += 1  # noqa: SIM113 (kernels have no enumerate)
        r = first + lane
        mask = (r < end)[:, None] & (c < channels)[None, :]
        value = tl.load(x + _offsets(start, r, c, channels, positions, inner), mask=mask, other=0.0).to(dtype)
        delta = tl.where(mask, value - mean, 0.0)
        mean += delta / step
        square += delta * (value - mean)
    number = tl.maximum((end - begin - lane + height - 1) // height, 0).to(dtype)[:, None]
    count, mean, square = _joined(number, mean, square, 3)
    _finish(
        count, mean, square, partial, moments, None, counters, splits, groups, c, channels, 3, lanes, width, dtype
    )  # fmt: skip


@triton.jit
def _affine(weight, bias, inverse, c, channels, width: tl.constexpr, dtype: tl.constexpr):
    """By what to multiply x − mean, and what to add to that."""
    scale = inverse
    if weight is not None:
        scale *= tl.load(weight + c, mask=c < channels, other=0.0).to(dtype)
    shift = tl.zeros([width], dtype)
    if bias is not None:
        shift += tl.load(bias + c, mask=c < channels, other=0.0).to(dtype)
    return scale, shift


@triton.jit
def _follow(running, term, weight, c, channels, dtype: tl.constexpr):
    """r ← (1 − m)·r + m·s."""
    before = tl.load(running + c, mask=c < channels, other=0.0).to(dtype)
    tl.store(running + c, (1.0 - weight) * before + weight * term, mask=c < channels)


@triton.jit(do_not_specialize=UNLIKE)
def _normalize(
    x, moments, weight, bias, residual, running_mean, running_var, counter, starts, y, statistics, terms,
    channels, positions, splits, parts, stride, eps: tl.constexpr, momentum: tl.constexpr, relu: tl.constexpr,
    inner: tl.constexpr, height: tl.constexpr, width: tl.constexpr, lanes: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """y from the moments of parts of a microbatch, [parts, 3, channels] each, `stride` apart; several microbatches have
    one part each. The first stretch writes mean and 1 / √(variance + eps), and mean and unbiased variance if wanted,
    [microbatches, 2, channels] each, and brings running statistics up to date; with a counter of the terms so far the
    weight of this one is 1 by their number."""
    m, start, _, begin, end = _stretch(starts, positions, splits, height)
    c = tl.program_id(1) * width + tl.arange(0, width)
    count, mean, square = _combined(moments + m * stride, parts, stride, c, channels, 3, lanes, width, dtype)
    inverse = 1.0 / tl.sqrt(square / tl.maximum(count, 1.0) + eps)
    if tl.program_id(0) % splits == 0:
        at = m * 2 * channels + c
        var = square / tl.maximum(count - 1.0, 1.0)
        tl.store(statistics + at, mean, mask=c < channels)
        tl.store(statistics + at + channels, inverse, mask=c < channels)
        if terms is not None:
            tl.store(terms + at, mean, mask=c < channels)
            tl.store(terms + at + channels, var, mask=c < channels)
        if running_mean is not None:
            share = tl.zeros([], dtype) + momentum
            if counter is not None:
                share = 1.0 / tl.load(counter).to(dtype)
            _follow(running_mean, mean, share, c, channels, dtype)
            _follow(running_var, var, share, c, channels, dtype)
    scale, shift = _affine(weight, bias, inverse, c, channels, width, dtype)
    for first in range(begin, end, height):
        r = first + tl.arange(0, height)
        mask = (r < end)[:, None] & (c < channels)[None, :]
        offsets = _offsets(start, r, c, channels, positions, inner)
        value = tl.load(x + offsets, mask=mask, other=0.0).to(dtype)
        value = (value - mean[None, :]) * scale[None, :] + shift[None, :]
        if residual is not None:
            value += tl.load(residual + offsets, mask=mask, other=0.0).to(dtype)
        if relu:
            value = tl.where(value <= 0.0, 0.0, value)  # what is no number stays none
        tl.store(y + offsets, value, mask=mask)


@triton.jit(do_not_specialize=UNLIKE)
def _gradient_sums(
    gradient, x, y, weight, bias, statistics, starts, counters, partial, sums, copy, masked,
    channels, positions, splits, groups, relu: tl.constexpr,
    inner: tl.constexpr, height: tl.constexpr, width: tl.constexpr, lanes: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Sums of dy and of dy · x̂ over microbatches: [microbatches, 2, channels]. Behind a ReLU dy is 0 where its result
    is: y, if that is given, and `masked` then becomes the gradient behind it; or else as computed again from x."""
    m, start, _, begin, end = _stretch(starts, positions, splits, height)
    c = tl.program_id(1) * width + tl.arange(0, width)
    at = m * 2 * channels + c
    mean = tl.load(statistics + at, mask=c < channels, other=0.0)
    inverse = tl.load(statistics + at + channels, mask=c < channels, other=0.0)
    total = tl.zeros([height, width], dtype)
    slope = tl.zeros([height, width], dtype)
    scale, shift = _affine(weight, bias, inverse, c, channels, width, dtype)
    for first in range(begin, end, height):
        r = first + tl.arange(0, height)
        mask = (r < end)[:, None] & (c < channels)[None, :]
        offsets = _offsets(start, r, c, channels, positions, inner)
        dy = tl.load(gradient + offsets, mask=mask, other=0.0).to(dtype)
        deviation = tl.load(x + offsets, mask=mask, other=0.0).to(dtype) - mean[None, :]
        if y is not None:
            dy = tl.where(tl.load(y + offsets, mask=mask, other=0.0) <= 0.0, 0.0, dy)
            tl.store(masked + offsets, dy, mask=mask)
        elif relu:
            dy = tl.where(deviation * scale[None, :] + shift[None, :] <= 0.0, 0.0, dy)
        total += dy
        slope += dy * deviation
    of_dy, of_slope, none = _joined(total, slope, tl.zeros([height, width], dtype), 2)
    of_slope *= inverse
    _finish(
        of_dy, of_slope, none, partial, sums, copy, counters, splits, groups, c, channels, 2, lanes, width, dtype
    )  # fmt: skip


@triton.jit(do_not_specialize=UNLIKE)
def _input_gradient(
    gradient, x, weight, bias, statistics, sums, starts, dx, number, channels, positions, splits, relu: tl.constexpr,
    inner: tl.constexpr, height: tl.constexpr, width: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """dx from the sums over as many numbers as a microbatch has, or over `number` on all ranks."""
    m, start, rows, begin, end = _stretch(starts, positions, splits, height)
    c = tl.program_id(1) * width + tl.arange(0, width)
    at = m * 2 * channels + c
    mean = tl.load(statistics + at, mask=c < channels, other=0.0)
    inverse = tl.load(statistics + at + channels, mask=c < channels, other=0.0)
    count = rows.to(dtype)
    if number is not None:
        count = tl.zeros([], dtype) + number
    mean_dy = tl.load(sums + at, mask=c < channels, other=0.0) / count
    slope = tl.load(sums + at + channels, mask=c < channels, other=0.0) / count * inverse
    scale, shift = _affine(weight, bias, inverse, c, channels, width, dtype)
    for first in range(begin, end, height):
        r = first + tl.arange(0, height)
        mask = (r < end)[:, None] & (c < channels)[None, :]
        offsets = _offsets(start, r, c, channels, positions, inner)
        dy = tl.load(gradient + offsets, mask=mask, other=0.0).to(dtype)
        deviation = tl.load(x + offsets, mask=mask, other=0.0).to(dtype) - mean[None, :]
        if relu:
            dy = tl.where(deviation * scale[None, :] + shift[None, :] <= 0.0, 0.0, dy)
        tl.store(dx + offsets, (dy - mean_dy[None, :] - deviation * slope[None, :]) * scale[None, :], mask=mask)


class _Work:
    """How the work on an activation is cut, and the kernels that are ready for it."""

    def __init__(
        self,
        shape: torch.Size,
        strides: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        sizes: tuple[int, ...],
    ) -> None:
        self.microbatches, self.channels, self.positions = len(sizes), shape[1], math.prod(shape[2:])
        inner = (strides[1] == 1 and self.channels > 1) or len(shape) == 2
        width = min(64, triton.next_power_of_2(self.channels)) if inner else 1
        rows = max(1, shape[0] * self.positions // self.microbatches)
        height = min(TILE // width, triton.next_power_of_2(rows))
        sum_dtype, block = (torch.float64, tl.float64) if dtype == torch.float64 else (torch.float32, tl.float32)
        self.wide, self.width, self.lanes = sum_dtype, width, LANES // width
        channel_blocks, steps = triton.cdiv(self.channels, width), triton.cdiv(rows, height)
        splits_to_fill = triton.cdiv(PROGRAMS, self.microbatches * channel_blocks)
        self.splits, many_splits = max(1, min(splits_to_fill, triton.cdiv(steps, 4))), max(1, triton.cdiv(steps, 8))
        size = self.splits if self.splits <= 2 * self.lanes else math.isqrt(self.splits - 1) + 1
        self.groups = triton.cdiv(self.splits, size)
        self.grid, self.many_grid = (
            (self.microbatches * count, channel_blocks) for count in (self.splits, many_splits)
        )
        self.counters = self.microbatches * (self.groups + 1) * channel_blocks
        self.summing = self.channels, self.positions, self.splits, self.groups
        self.writing = self.channels, self.positions, many_splits
        self.tile, self.type = (inner, height, width), block
        self._starts = Constants(list(itertools.accumulate(sizes, initial=0)))
        self._device = device
        self._launches: dict[tuple[object, ...], Launch] = {}

    def starts(self, x: Tensor) -> Tensor:
        """The first sample of each microbatch, and the end of the last."""
        return self._starts.like(x, torch.int64)

    def empty(self, *shape: int) -> Tensor:
        """Uninitialized numbers for each channel."""
        return torch.empty(*shape, self.channels, dtype=self.wide, device=self._device)

    def launch(self, kernel, grid: tuple[int, ...], tensors: Sequence[Tensor | None], *numbers: object) -> None:
        key = id(kernel), numbers, *[tensor if tensor is None else tensor.dtype for tensor in tensors]
        if key not in self._launches:
            self._launches[key] = Launch(kernel, grid, numbers, self._device)
        self._launches[key](tensors)


_work = functools.cache(_Work)  # for good: a CUDA graph reads the `starts` of those that it was recorded with


def _of(x: Tensor, sizes: Sequence[int]) -> _Work:
    return _work(x.shape, x.stride(), x.dtype, x.device, tuple(sizes))


def try_out(device: torch.device) -> None:
    """Launch the kernels of a layer forward and backward."""
    x = torch.zeros(4, 64, 8, 8, device=device, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    sizes = (2, 2)
    y, statistics, _ = normalize(x, moments(x, sizes), Norm(None, None, None, 1.0, True), None, sizes)
    saved = Saved(x, y, None, None, statistics, sizes, False)
    sums, _, dy = gradient_sums(y, saved)
    input_gradient(dy, saved, sums, None)


def moments(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """As in `batch_norm_torch`."""
    work = _of(x, sizes)
    partial, result = work.empty(work.microbatches, work.splits + work.groups, 3), work.empty(work.microbatches, 3)
    tensors = x, work.starts(x), counters(x, work.counters), partial, result
    work.launch(_moments, work.grid, tensors, *work.summing, *work.tile, work.lanes, work.type)
    return result


def normalize(
    x: Tensor, moments: Tensor, norm: Norm, running: Running | None, sizes: Sequence[int], wants_terms: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As in `batch_norm_torch`."""
    work, parts = _of(x, sizes), len(moments) if len(sizes) == 1 else 1
    if parts > MANY:
        moments, parts = combined(moments), 1
    y, statistics = torch.empty_like(x), work.empty(work.microbatches, 2)
    terms = work.empty(work.microbatches, 2) if wants_terms else None
    mean, var, momentum, count = (None, None, 0.0, None) if running is None else running.buffers
    tensors = x, moments, *norm[:3], mean, var, None if momentum is not None else count, work.starts(x), y
    lanes = min(work.lanes, triton.next_power_of_2(parts))
    settings = norm.eps, momentum or 0.0, norm.relu, *work.tile, lanes, work.type
    numbers = *work.writing, parts, moments.stride(0), *settings
    work.launch(_normalize, work.many_grid, (*tensors, statistics, terms), *numbers)
    return y, statistics, terms


def gradient_sums(gradient: Tensor, saved: Saved, copies: bool = False) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As in `batch_norm_torch`."""
    x, y, weight, bias, statistics, sizes, relu = saved
    work = _of(x, sizes)
    partial = work.empty(work.microbatches, work.splits + work.groups, 2)
    sums, copy = work.empty(work.microbatches, 2), work.empty(work.microbatches, 2) if copies else None
    masked = None if y is None else torch.empty_like(gradient)
    tensors = gradient, x, y, weight, bias, statistics, work.starts(x), counters(x, work.counters), partial, sums
    numbers = *work.summing, relu, *work.tile, work.lanes, work.type
    work.launch(_gradient_sums, work.grid, (*tensors, copy, masked), *numbers)
    return sums, copy, masked


def input_gradient(gradient: Tensor, saved: Saved, sums: Tensor, total: int | None) -> Tensor:
    """As in `batch_norm_torch`."""
    x, _, weight, bias, statistics, sizes, relu = saved
    work, dx = _of(x, sizes), torch.empty_like(x)
    tensors = gradient, x, weight, bias, statistics, sums, work.starts(x), dx
    work.launch(_input_gradient, work.many_grid, tensors, total, *work.writing, relu, *work.tile, work.type)
    return dx
