"""A tensor changes its layout: the steps of `plans/transfer.py` on real tensors, each with its conjugate as backward.

Parts of a tensor are lists of indices: they are taken out, and a tensor is put together from them (`Region`,
`Assembly`). What travels within a group is planned once, by the indices that ranks hold (`Exchange`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from convoy.comm import collectives
from convoy.comm.collectives import Group
from convoy.comm.groups import Groups
from convoy.comm.position import current
from convoy.errors import ConvoyError
from convoy.plans.layout import Indices, Layout, common, indices, without
from convoy.plans.mesh import Axes, Coordinates
from convoy.plans.transfer import Step

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


class Exchange:
    """Ranks send each other boxes of what they hold, and get what they want; `transposed` sends gradients back. What
    overlaps is added, and elements that nobody sends are zero.

    `held` and `wanted` are those of every rank of the group, and `box` says what a rank sends another, by their
    numbers.
    """

    def __init__(
        self, held: Sequence[Box], wanted: Sequence[Box], box: Callable[[int, int], Box], group: Group, index: int
    ) -> None:
        ranks = range(len(held))
        boxes = {(sender, receiver): box(sender, receiver) for sender in ranks for receiver in ranks}
        self._is_idle = all(is_empty(box) for (sender, receiver), box in boxes.items() if sender != receiver)
        self._index = index
        self._group = group
        self._leaving = Assembly(extents(held[index]), [Region(boxes[index, rank], held[index]) for rank in ranks])
        self._arriving = Assembly(extents(wanted[index]), [Region(boxes[rank, index], wanted[index]) for rank in ranks])
        self.disjoint = self._arriving.disjoint
        # all ranks get all parts, which have one shape: one collective does it
        is_even = len({extents(part) for part in held}) == 1
        self._is_gather = is_even and not self._is_idle and all(boxes[pair] == held[pair[0]] for pair in boxes)

    def __call__(self, x: Tensor) -> Tensor:
        """From what this rank holds to what it wants."""
        if self._is_gather:
            return self._arriving(collectives.all_gather(x.contiguous(), self._group).unbind(0))
        return self._send(x, self._leaving, self._arriving)

    def transposed(self, x: Tensor) -> Tensor:
        """From the gradient of what this rank wanted to that of what it held."""
        if self._is_gather:
            rows = torch.stack([region.select(x) for region in self._arriving.regions])
            return collectives.reduce_scatter(rows, self._group)
        return self._send(x, self._arriving, self._leaving)

    def _send(self, x: Tensor, source: Assembly, target: Assembly) -> Tensor:
        local_part = source.regions[self._index].select(x)
        if self._is_idle:
            return target([local_part] * len(target.regions))
        sends = [None if region.empty else region.select(x) for region in source.regions]
        sends[self._index] = x.new_empty(0)
        shapes = [None if region.empty else region.shape for region in target.regions]
        shapes[self._index] = None
        parts = collectives.exchange(sends, shapes, self._group)
        parts[self._index] = local_part
        return target(parts)


def _routes(
    held: Sequence[Box], positions: Sequence[tuple[int, ...]], wanted: Box, receiver: int
) -> Callable[[int], Box]:
    """What each rank sends to one that wants some indices: it has from itself what it holds, the rest from the first
    other one. `positions` say which part of every dimension each rank holds."""
    parts: list[dict[int, Indices]] = []
    for dim, needed in enumerate(wanted):
        held_parts = {place[dim]: box[dim] for place, box in zip(positions, held, strict=True)}
        own_position = positions[receiver][dim]
        by_position: dict[int, Indices] = {}
        for position in sorted(held_parts, key=lambda position: (position != own_position, position)):
            by_position[position] = common(held_parts[position], needed)
            needed = without(needed, held_parts[position])
        assert not len(needed), f"nobody in the group holds {needed} of dimension {dim}"
        parts.append(by_position)
    return lambda sender: tuple(part[position] for part, position in zip(parts, positions[sender], strict=True))


Move = Callable[[Tensor], Tensor]


class Transfer:
    """One step on one rank: takes its tensor in `step.source` and gives its tensor in `step.target`; `shape` is that of
    the whole tensor. All ranks build and call the same transfers in the same order.

    With `channels_last`, the same on all ranks, 4-d and 5-d tensors travel, and are given, with the channels innermost
    in memory. Inputs and gradients may lie in any order; the right one saves a copy.
    """

    def __init__(self, step: Step, groups: Groups, shape: Sequence[int], channels_last: bool = False) -> None:
        self.step = step
        dims = tuple(range(len(shape)))
        self._order = (0, *dims[2:], 1) if channels_last and len(shape) in (4, 5) else dims
        self._back = tuple(self._order.index(dim) for dim in dims)
        self._is_plain = self._order == dims
        self.shape = tuple(shape)
        self._groups, self._mesh, self._place = groups, groups.mesh, groups.coordinates
        self.source_shape = step.source.local_shape(shape, groups.mesh, groups.coordinates)
        make: dict[str, Callable[[], tuple[Move, Move]]] = {
            "reduce": lambda: (self._sum(), _same),
            "copy": lambda: (_same, self._sum()),
            "keep": self._keep,
            "slice": self._slice,
            "gather": self._gather,
            "move": self._move,
            "reduce_scatter": self._reduce_scatter,
        }
        self._forward, self._backward = make[step.kind]()

    def __call__(self, x: Tensor) -> Tensor:
        assert x.shape == self.source_shape, f"{tuple(x.shape)} is not {self.source_shape} of {self.step}"
        result: Tensor = _Function.apply(x, self)
        return result

    def forward(self, x: Tensor) -> Tensor:
        return self._in_order(self._forward, x)

    def backward(self, gradient: Tensor) -> Tensor:
        """The conjugate of the step: from the gradient of its result to that of its input."""
        return self._in_order(self._backward, gradient)

    def _in_order(self, move: Move, x: Tensor) -> Tensor:
        if self._is_plain:
            return move(x)
        return move(x.permute(self._order)).permute(self._back)

    def _box(self, layout: Layout, place: Coordinates) -> Box:
        """The indices that a rank holds, dimensions in the order of memory."""
        return tuple(layout.parts(dim, self._mesh, place, self.shape[dim]) for dim in self._order)

    def _collect(self, layout: Layout, whole: Box, axes: Axes) -> Exchange:
        """Every rank of the group over `axes` gives its part in `layout`; each gets all of them in `whole`."""
        members = self._mesh.group(self._place, axes)
        held = [self._box(layout, member) for member in members]
        wanted = [whole] * len(members)
        return Exchange(held, wanted, lambda sender, _: held[sender], self._groups.of(axes), members.index(self._place))

    def _sum(self) -> Move:
        group = self._groups.of(self.step.axes)
        return lambda x: collectives.all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    def _keep(self) -> tuple[Move, Move]:
        first = self._mesh.index(self._place, self.step.axes) == 0
        return _same, _same if first else torch.zeros_like

    def _slice(self) -> tuple[Move, Move]:
        source, target = self.step.source, self.step.target
        whole = self._box(source, self._place)
        axes = tuple(axis for axis in self.step.axes if axis not in source.copied)
        return Region(self._box(target, self._place), whole).take, self._collect(target, whole, axes)

    def _gather(self) -> tuple[Move, Move]:
        source, target = self.step.source, self.step.target
        whole = self._box(target, self._place)
        collect = self._collect(source, whole, self.step.axes)
        assert collect.disjoint, f"parts that overlap cannot be gathered: {self.step}"
        return collect, Region(self._box(source, self._place), whole).take

    def _reduce_scatter(self) -> tuple[Move, Move]:
        source, target = self.step.source, self.step.target
        collect = self._collect(target, self._box(source, self._place), self.step.axes)
        return collect.transposed, collect

    def _move(self) -> tuple[Move, Move]:
        source, target, axes = self.step.source, self.step.target, self.step.axes
        assert set(axes) <= source.split_axes, f"ranks that hold the same cannot all send it: {self.step}"
        members = self._mesh.group(self._place, axes)
        held = [self._box(source, member) for member in members]
        wanted = [self._box(target, member) for member in members]
        positions = [self._positions(member) for member in members]
        routes = [_routes(held, positions, box, receiver) for receiver, box in enumerate(wanted)]
        group, index = self._groups.of(axes), members.index(self._place)
        exchange = Exchange(held, wanted, lambda sender, receiver: routes[receiver](sender), group, index)
        return exchange, exchange.transposed

    def _positions(self, place: Coordinates) -> tuple[int, ...]:
        """Which part of every dimension, in the order of memory, a rank holds before the step."""
        splits = (self.step.source.split(dim) for dim in self._order)
        return tuple(self._mesh.index(place, split.axes) if split else 0 for split in splits)


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass whose result is not differentiated; torch's `once_differentiable` says nothing where the gradient
    that comes is a constant, and the second derivatives are then wrong."""

    def checked(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():  # under create_graph=True alone
            raise ConvoyError(
                "create_graph=True would differentiate a gradient of which this rank has a part: take a plan sample=N "
                "with convoy.parallelize(..., loss='part'), and divide sums over samples by the global batch"
            )
        return backward(ctx, *gradients)

    return checked


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer, ctx.layer = transfer, current.layer
        return transfer.forward(x)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        current.at(ctx.layer)
        return ctx.transfer.backward(gradient), None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def chained(transfers: Sequence[Transfer]) -> Move:
    """Several steps one after another; without any, the tensor itself."""

    def run(x: Tensor) -> Tensor:
        for transfer in transfers:
            x = transfer(x)
        return x

    return run


def redistribute(steps: Sequence[Step], groups: Groups, shape: Sequence[int], channels_last: bool = False) -> Move:
    """The steps of one tensor on one rank; arguments as for `Transfer`."""
    return chained([Transfer(step, groups, shape, channels_last) for step in steps])
