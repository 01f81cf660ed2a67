"""Parts of a tensor by lists of indices: taking them out and putting a tensor together from them."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from convoy.plans.layout import Indices, common, indices

_MOST_RUNS = 64

Box = tuple[Indices, ...]  # global indices of every dimension: what one rank holds of a tensor


def is_empty(box: Box) -> bool:
    """Whether a box holds no element."""
    return not all(len(part) for part in box)


def extents(box: Box) -> tuple[int, ...]:
    """Shape of the tensor that holds a box."""
    return tuple(len(part) for part in box)


class Region:
    """Where a box lies in the tensor that holds a larger box."""

    def __init__(self, part: Box, whole: Box) -> None:
        self.shape = extents(part)
        self.places = tuple(_positions(inner, outer) for inner, outer in zip(part, whole, strict=True))
        self.empty = is_empty(part)
        sizes = extents(whole)
        self.full = self.shape == sizes and all(isinstance(place, range) for place in self.places)
        self._cuts = [
            (dim, place.start, len(place))
            for dim, place in enumerate(self.places)
            if isinstance(place, range) and len(place) != sizes[dim]
        ]
        self._picks = [(dim, torch.tensor(place)) for dim, place in enumerate(self.places) if isinstance(place, tuple)]
        self._runs = _runs(self.places[self._picks[0][0]]) if len(self._picks) == 1 else ()

    def select(self, x: Tensor) -> Tensor:
        """The part of `x`, a view where all its indices are consecutive."""
        x = self._cut(x)
        if self._runs:
            dim = self._picks[0][0]
            return torch.cat([x.narrow(dim, start, length) for start, length in self._runs], dim)
        for index, (dim, _) in enumerate(self._picks):
            x = x.index_select(dim, self._numbers(index, x))
        return x

    def take(self, x: Tensor) -> Tensor:
        """The part of `x`, contiguous."""
        return self.select(x).contiguous()

    def write(self, x: Tensor, part: Tensor, accumulate: bool = False) -> None:
        """Overwrite the part of `x`, or add to it."""
        target, put = self._cut(x), Tensor.add_ if accumulate else Tensor.copy_
        if not self._picks:
            put(target, part)
        elif self._runs:
            for target_run, part_run in self._pairs(target, part):
                put(target_run, part_run)
        elif len(self._picks) == 1:
            by_index = target.index_add_ if accumulate else target.index_copy_
            by_index(self._picks[0][0], self._numbers(0, x), part)
        else:
            target.index_put_(self._grid(target), part, accumulate)

    def _cut(self, x: Tensor) -> Tensor:
        for dim, start, length in self._cuts:
            x = x.narrow(dim, start, length)
        return x

    def _pairs(self, target: Tensor, part: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Every run of consecutive indices in the tensor and in the part."""
        dim, offset = self._picks[0][0], 0
        for start, length in self._runs:
            yield target.narrow(dim, start, length), part.narrow(dim, offset, length)
            offset += length

    def _numbers(self, index: int, x: Tensor) -> Tensor:
        dim, numbers = self._picks[index]
        if numbers.device != x.device:
            numbers = numbers.to(x.device)
            self._picks[index] = dim, numbers
        return numbers

    def _grid(self, x: Tensor) -> tuple[Tensor, ...]:
        """The index of every dimension, shaped so that they broadcast to the part."""
        lists = [torch.arange(length, device=x.device) for length in x.shape]
        for index, (dim, _) in enumerate(self._picks):
            lists[dim] = self._numbers(index, x)
        return tuple(numbers.view(-1, *(1,) * (x.ndim - 1 - dim)) for dim, numbers in enumerate(lists))


class Assembly:
    """A tensor made of parts: beside each other, or added where they overlap and zero where there is none."""

    def __init__(self, shape: Sequence[int], regions: Sequence[Region]) -> None:
        self.shape = tuple(shape)
        self.regions = tuple(regions)
        self._kept = [index for index, region in enumerate(regions) if not region.empty]
        self._kept.sort(key=lambda index: not regions[index].full)  # the others are added to what is there in full
        self.disjoint, self._covered = _counts(self.shape, [regions[index] for index in self._kept])

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """Put the parts together, one for each region."""
        first, *numbers = self._kept or [0]
        if self._kept and self.regions[first].full:
            whole = (
                parts[first].contiguous() if not numbers else parts[first].clone(memory_format=torch.contiguous_format)
            )
        else:
            whole = parts[0].new_empty(self.shape) if self._covered else parts[0].new_zeros(self.shape)
            numbers = self._kept
        for index in numbers:
            self.regions[index].write(whole, parts[index], accumulate=not self.disjoint)
        return whole


def _positions(part: Indices, whole: Indices) -> Indices:
    assert len(common(part, whole)) == len(part), f"{part} is not a part of {whole}"
    if isinstance(whole, range) and isinstance(part, range):
        return range(part.start - whole.start, part.stop - whole.start) if len(part) else range(0)
    place = {number: position for position, number in enumerate(whole)}
    return indices(place[number] for number in part)


def _runs(place: Indices) -> tuple[tuple[int, int], ...]:
    """Start and length of every run of consecutive indices, as torch gathers and adds runs by whole blocks of memory,
    and lists of indices element by element; nothing where there are so many runs that a list is better."""
    starts = [at for at, index in enumerate(place) if at == 0 or place[at - 1] != index - 1]
    if len(starts) > _MOST_RUNS:
        return ()
    ends = [*starts[1:], len(place)]
    return tuple((place[start], end - start) for start, end in zip(starts, ends, strict=True))


def _counts(shape: tuple[int, ...], regions: Sequence[Region]) -> tuple[bool, bool]:
    """Whether the regions are disjoint, and whether they cover a tensor."""
    parts = [region.places for region in regions]
    total = sum(math.prod(region.shape) for region in regions)
    disjoint = not any(
        all(len(common(a, b)) for a, b in zip(first, second, strict=True))
        for index, first in enumerate(parts)
        for second in parts[index + 1 :]
    )
    return disjoint, disjoint and total == math.prod(shape)
