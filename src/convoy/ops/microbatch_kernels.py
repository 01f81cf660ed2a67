# mypy: ignore-errors
"""Triton kernels of `ops/microbatch_norm.py` and `ops/shared_batch_norm.py`.

An activation is [samples, channels, positions], with the channels innermost in memory (`inner`) or the positions. The
numbers of a channel in a microbatch are its rows; a program computes a stretch of rows of some channels, `height` times
`width` numbers at a time. Statistics take two steps, for a microbatch has too few channels to fill a GPU: stretches
of rows give count, mean and square deviation, which are then combined (Chan, Golub and LeVeque, 1979).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from convoy.ops.gpu import on_its_gpu

PROGRAMS = 1024
"""About as many as fill a GPU several times."""
TILE = 2048
"""Numbers that a program has in hand at a time."""


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
def _moments(
    x,
    starts,
    partial,
    channels,
    positions,
    splits,
    inner: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    dtype: tl.constexpr,
):
    """Count, mean and sum of squared deviations of stretches of rows: [microbatches, splits, 3, channels]."""
    m = tl.program_id(0) // splits
    k = tl.program_id(0) % splits
    start = tl.load(starts + m)
    rows = ((tl.load(starts + m + 1) - start) * positions).to(tl.int32)
    length = tl.cdiv(tl.cdiv(rows, splits), height) * height
    begin = k * length
    end = tl.minimum(begin + length, rows)
    c = tl.program_id(1) * width + tl.arange(0, width)
    lane = tl.arange(0, height)
    mean = tl.zeros([height, width], dtype)
    square = tl.zeros([height, width], dtype)
    step = 0
    for first in range(begin, end, height):
        step += 1  # noqa: SIM113 (kernels have no enumerate)
        r = first + lane
        there = (r < end)[:, None] & (c < channels)[None, :]
        value = tl.load(x + _offsets(start, r, c, channels, positions, inner), mask=there, other=0.0).to(dtype)
        delta = tl.where(there, value - mean, 0.0)
        mean += delta / step
        square += delta * (value - mean)
    number = tl.maximum((end - begin - lane + height - 1) // height, 0).to(dtype)[:, None]
    count = tl.sum(number, 0)
    whole = tl.sum(mean * number, 0) / tl.maximum(count, 1.0)
    away = mean - whole[None, :]
    square = tl.sum(square + number * away * away, 0)
    at = partial + tl.program_id(0).to(tl.int64) * 3 * channels + c
    tl.store(at, tl.zeros([width], dtype) + count, mask=c < channels)
    tl.store(at + channels, whole, mask=c < channels)
    tl.store(at + 2 * channels, square, mask=c < channels)


@triton.jit
def _combine(
    partial, moments, statistics, terms, channels, splits,
    eps: tl.constexpr, width: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Count, mean and sum of squared deviations, [microbatches, 3, channels], if wanted; or else mean and
    1 / √(variance + eps), and mean and unbiased variance, [microbatches, 2, channels] each."""
    m = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * width + tl.arange(0, width)
    count = tl.zeros([width], dtype)
    mean = tl.zeros([width], dtype)
    square = tl.zeros([width], dtype)
    for k in range(splits):
        at = partial + (m * splits + k) * 3 * channels + c
        number = tl.load(at, mask=c < channels, other=0.0)
        delta = tl.load(at + channels, mask=c < channels, other=0.0) - mean
        total = tl.maximum(count + number, 1.0)
        mean += delta * (number / total)
        square += tl.load(at + 2 * channels, mask=c < channels, other=0.0) + delta * delta * (count * number / total)
        count += number
    if moments is not None:
        at = moments + m * 3 * channels + c
        tl.store(at, count, mask=c < channels)
        tl.store(at + channels, mean, mask=c < channels)
        tl.store(at + 2 * channels, square, mask=c < channels)
    else:
        at = m * 2 * channels + c
        var = square / tl.maximum(count, 1.0)
        tl.store(statistics + at, mean, mask=c < channels)
        tl.store(statistics + at + channels, 1.0 / tl.sqrt(var + eps), mask=c < channels)
        tl.store(terms + at, mean, mask=c < channels)
        tl.store(terms + at + channels, square / tl.maximum(count - 1.0, 1.0), mask=c < channels)


@triton.jit
def _follow(
    running_mean,
    running_var,
    terms,
    counter,
    momentum: tl.constexpr,
    number,
    channels,
    width: tl.constexpr,
    dtype: tl.constexpr,
):
    """r ← (1 − m)·r + m·s for one microbatch after the other; with a counter m is one by the number of terms."""
    c = tl.program_id(0) * width + tl.arange(0, width)
    mean = tl.load(running_mean + c, mask=c < channels, other=0.0).to(dtype)
    var = tl.load(running_var + c, mask=c < channels, other=0.0).to(dtype)
    weight = tl.zeros([], dtype) + momentum
    for m in range(number):
        if counter is not None:
            weight = 1.0 / (tl.load(counter) - number + m + 1).to(dtype)
        mean = (1.0 - weight) * mean + weight * tl.load(terms + m * 2 * channels + c, mask=c < channels, other=0.0)
        var = (1.0 - weight) * var + weight * tl.load(
            terms + m * 2 * channels + channels + c, mask=c < channels, other=0.0
        )
    tl.store(running_mean + c, mean, mask=c < channels)
    tl.store(running_var + c, var, mask=c < channels)


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
def _normalize(
    x, weight, bias, statistics, starts, y, channels, positions, splits, relu: tl.constexpr,
    inner: tl.constexpr, height: tl.constexpr, width: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) // splits
    k = tl.program_id(0) % splits
    start = tl.load(starts + m)
    rows = ((tl.load(starts + m + 1) - start) * positions).to(tl.int32)
    length = tl.cdiv(tl.cdiv(rows, splits), height) * height
    c = tl.program_id(1) * width + tl.arange(0, width)
    at = statistics + m.to(tl.int64) * 2 * channels + c
    mean = tl.load(at, mask=c < channels, other=0.0)
    inverse = tl.load(at + channels, mask=c < channels, other=0.0)
    scale, shift = _affine(weight, bias, inverse, c, channels, width, dtype)
    for first in range(k * length, tl.minimum(k * length + length, rows), height):
        r = first + tl.arange(0, height)
        there = (r < rows)[:, None] & (c < channels)[None, :]
        offsets = _offsets(start, r, c, channels, positions, inner)
        value = tl.load(x + offsets, mask=there, other=0.0).to(dtype)
        found = (value - mean[None, :]) * scale[None, :] + shift[None, :]
        if relu:
            found = tl.where(found <= 0.0, 0.0, found)  # what is no number stays none
        tl.store(y + offsets, found, mask=there)


@triton.jit
def _gradient_sums(
    gradient, x, weight, bias, statistics, starts, partial, channels, positions, splits, relu: tl.constexpr,
    inner: tl.constexpr, height: tl.constexpr, width: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Sums of dy and of dy · x̂ over stretches of rows: [microbatches, splits, 2, channels]."""
    m = tl.program_id(0) // splits
    k = tl.program_id(0) % splits
    start = tl.load(starts + m)
    rows = ((tl.load(starts + m + 1) - start) * positions).to(tl.int32)
    length = tl.cdiv(tl.cdiv(rows, splits), height) * height
    c = tl.program_id(1) * width + tl.arange(0, width)
    at = statistics + m.to(tl.int64) * 2 * channels + c
    mean = tl.load(at, mask=c < channels, other=0.0)
    inverse = tl.load(at + channels, mask=c < channels, other=0.0)
    total = tl.zeros([height, width], dtype)
    slope = tl.zeros([height, width], dtype)
    scale, shift = _affine(weight, bias, inverse, c, channels, width, dtype)
    for first in range(k * length, tl.minimum(k * length + length, rows), height):
        r = first + tl.arange(0, height)
        there = (r < rows)[:, None] & (c < channels)[None, :]
        offsets = _offsets(start, r, c, channels, positions, inner)
        dy = tl.load(gradient + offsets, mask=there, other=0.0).to(dtype)
        away = tl.load(x + offsets, mask=there, other=0.0).to(dtype) - mean[None, :]
        if relu:
            dy = tl.where(away * scale[None, :] + shift[None, :] <= 0.0, 0.0, dy)
        total += dy
        slope += dy * away
    at = partial + tl.program_id(0).to(tl.int64) * 2 * channels + c
    tl.store(at, tl.sum(total, 0), mask=c < channels)
    tl.store(at + channels, tl.sum(slope, 0) * inverse, mask=c < channels)


@triton.jit
def _input_gradient(
    gradient, x, weight, bias, statistics, sums, starts, dx, number, channels, positions, splits, relu: tl.constexpr,
    inner: tl.constexpr, height: tl.constexpr, width: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) // splits
    k = tl.program_id(0) % splits
    start = tl.load(starts + m)
    rows = ((tl.load(starts + m + 1) - start) * positions).to(tl.int32)
    length = tl.cdiv(tl.cdiv(rows, splits), height) * height
    c = tl.program_id(1) * width + tl.arange(0, width)
    at = m.to(tl.int64) * 2 * channels + c
    mean = tl.load(statistics + at, mask=c < channels, other=0.0)
    inverse = tl.load(statistics + at + channels, mask=c < channels, other=0.0)
    count = rows.to(dtype)
    if number is not None:  # of all ranks
        count = tl.zeros([], dtype) + number
    mean_dy = tl.load(sums + at, mask=c < channels, other=0.0) / count
    slope = tl.load(sums + at + channels, mask=c < channels, other=0.0) / count * inverse
    scale, shift = _affine(weight, bias, inverse, c, channels, width, dtype)
    for first in range(k * length, tl.minimum(k * length + length, rows), height):
        r = first + tl.arange(0, height)
        there = (r < rows)[:, None] & (c < channels)[None, :]
        offsets = _offsets(start, r, c, channels, positions, inner)
        dy = tl.load(gradient + offsets, mask=there, other=0.0).to(dtype)
        away = tl.load(x + offsets, mask=there, other=0.0).to(dtype) - mean[None, :]
        if relu:
            dy = tl.where(away * scale[None, :] + shift[None, :] <= 0.0, 0.0, dy)
        tl.store(dx + offsets, (dy - mean_dy[None, :] - away * slope[None, :]) * scale[None, :], mask=there)


class _Work:
    """How the work on an activation is cut."""

    def __init__(self, x: Tensor, starts: Tensor) -> None:
        self.microbatches, self.channels, self.positions = len(starts) - 1, x.shape[1], math.prod(x.shape[2:])
        inner = (x.stride(1) == 1 and x.shape[1] > 1) or x.dim() == 2
        block = min(64, triton.next_power_of_2(self.channels)) if inner else 1
        rows = max(1, len(x) * self.positions // self.microbatches)
        height = min(TILE // block, triton.next_power_of_2(rows))
        self.wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        self.options = {"inner": inner, "height": height, "width": block, "dtype": _wide(x)}
        self.channel_blocks = triton.cdiv(self.channels, block)
        steps = triton.cdiv(rows, height)
        wanted = triton.cdiv(PROGRAMS, self.microbatches * self.channel_blocks)
        self.splits = max(1, min(wanted, triton.cdiv(steps, 4)))
        self.many_splits = max(1, triton.cdiv(steps, 8))

    def grid(self, splits: int) -> tuple[int, int]:
        return self.microbatches * splits, self.channel_blocks


def try_out(device: torch.device) -> None:
    """Launch the forward kernels."""
    starts = torch.arange(0, 4, 2, device=device)
    forward(torch.zeros(2, 1, device=device), None, None, None, None, None, None, starts, 1.0, True)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    count: Tensor | None,
    momentum: float | None,
    starts: Tensor,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, statistics and terms of `convoy::normalize_microbatches`; `starts` int64 [microbatches + 1]."""
    return normalize(
        x, _partial(x, starts), weight, bias, running_mean, running_var, count, momentum, starts, eps, relu
    )


def moments(x: Tensor, starts: Tensor) -> Tensor:
    """Count, mean and sum of squared deviations: [microbatches, 3, channels]."""
    partial = _partial(x, starts)
    microbatches, splits, _, channels = partial.shape
    found = partial.new_empty(microbatches, 3, channels)
    block, wide = min(128, triton.next_power_of_2(channels)), _wide(x)
    with on_its_gpu(x):
        grid = microbatches, triton.cdiv(channels, block)
        _combine[grid](partial, found, None, None, channels, splits, 0.0, width=block, dtype=wide)
    return found


def normalize(
    x: Tensor,
    partial: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    count: Tensor | None,
    momentum: float | None,
    starts: Tensor,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `forward`, from the moments of parts of the microbatches on whatever ranks; `x` may be empty.

    `partial` [microbatches, parts, 3, channels].
    """
    microbatches, parts, _, channels = partial.shape
    statistics, terms = (partial.new_empty(microbatches, 2, channels) for _ in range(2))
    y = torch.empty_like(x)
    block, wide = min(128, triton.next_power_of_2(channels)), _wide(x)
    with on_its_gpu(x):
        grid = microbatches, triton.cdiv(channels, block)
        _combine[grid](partial, None, statistics, terms, channels, parts, eps, width=block, dtype=wide)
        if running_mean is not None:
            counted = (count, 0.0) if momentum is None else (None, momentum)
            buffers = running_mean, running_var, terms
            _follow[grid[1:]](*buffers, *counted, microbatches, channels, width=block, dtype=wide)
        if x.numel():
            work = _Work(x, starts)
            many = work.many_splits
            shape = channels, work.positions, many
            _normalize[work.grid(many)](x, weight, bias, statistics, starts, y, *shape, relu, **work.options)
    return y, statistics, terms


def gradient_sums(
    gradient: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, starts: Tensor,
    relu: bool,
) -> Tensor:  # fmt: skip
    """For each microbatch the sums of dy and of dy · x̂: [microbatches, 2, channels]."""
    work = _Work(x, starts)
    partial = x.new_empty(work.microbatches, work.splits, 2, work.channels, dtype=work.wide)
    shape = work.channels, work.positions, work.splits
    with on_its_gpu(x):
        _gradient_sums[work.grid(work.splits)](
            gradient, x, weight, bias, statistics, starts, partial, *shape, relu, **work.options
        )
    return partial.sum(1)


def input_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, sums: Tensor,
    starts: Tensor, number: int | None, relu: bool,
) -> Tensor:  # fmt: skip
    """dx from these sums; over so many numbers of each channel, if that is not what the microbatch has."""
    work = _Work(x, starts)
    dx, many = torch.empty_like(x), work.many_splits
    shape = work.channels, work.positions, many
    with on_its_gpu(x):
        _input_gradient[work.grid(many)](
            gradient, x, weight, bias, statistics, sums, starts, dx, number, *shape, relu, **work.options
        )
    return dx


def _partial(x: Tensor, starts: Tensor) -> Tensor:
    """The moments of stretches of rows: [microbatches, stretches, 3, channels]."""
    work = _Work(x, starts)
    partial = x.new_empty(work.microbatches, work.splits, 3, work.channels, dtype=work.wide)
    shape = work.channels, work.positions, work.splits
    with on_its_gpu(x):
        _moments[work.grid(work.splits)](x, starts, partial, *shape, **work.options)
    return partial


def _wide(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
