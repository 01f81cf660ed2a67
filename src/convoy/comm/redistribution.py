"""A tensor changes its layout: the steps of `plans/transfer.py` on real tensors, each with its conjugate as backward.

What travels within a group is planned once, by the indices that ranks hold (`Exchange`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from convoy.comm import collectives
from convoy.comm.collectives import Group
from convoy.comm.groups import Groups
from convoy.comm.position import current
from convoy.comm.regions import Assembly, Box, Region, extents, is_empty
from convoy.plans.layout import Indices, Layout, common, without
from convoy.plans.mesh import Axes, Coordinates, Mesh
from convoy.plans.transfer import Step


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

    def __init__(
        self,
        step: Step,
        mesh: Mesh,
        coordinates: Coordinates,
        groups: Groups,
        shape: Sequence[int],
        channels_last: bool = False,
    ) -> None:
        self.step = step
        dims = tuple(range(len(shape)))
        self._order = (0, *dims[2:], 1) if channels_last and len(shape) in (4, 5) else dims
        self._back = tuple(self._order.index(dim) for dim in dims)
        self._is_plain = self._order == dims
        self.shape = tuple(shape)
        self._mesh = mesh
        self._groups = groups
        self.source_shape = step.source.local_shape(shape, mesh, coordinates)
        make: dict[str, Callable[[Coordinates], tuple[Move, Move]]] = {
            "reduce": self._reduce,
            "copy": self._copy,
            "keep": self._keep,
            "slice": self._slice,
            "gather": self._gather,
            "move": self._move,
            "reduce_scatter": self._reduce_scatter,
        }
        self._forward, self._backward = make[step.kind](coordinates)

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

    def _collect(self, layout: Layout, whole: Box, place: Coordinates, axes: Axes) -> Exchange:
        """Every rank of the group over `axes` gives its part in `layout`; each gets all of them in `whole`."""
        members = self._mesh.group(place, axes)
        held = [self._box(layout, member) for member in members]
        wanted = [whole] * len(members)
        return Exchange(held, wanted, lambda sender, _: held[sender], self._groups.of(axes), members.index(place))

    def _reduce(self, place: Coordinates) -> tuple[Move, Move]:
        return self._sum(), _same

    def _copy(self, place: Coordinates) -> tuple[Move, Move]:
        return _same, self._sum()

    def _sum(self) -> Move:
        group = self._groups.of(self.step.axes)
        return lambda x: collectives.all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    def _keep(self, place: Coordinates) -> tuple[Move, Move]:
        first = self._mesh.index(place, self.step.axes) == 0
        return _same, _same if first else torch.zeros_like

    def _slice(self, place: Coordinates) -> tuple[Move, Move]:
        source, target = self.step.source, self.step.target
        whole = self._box(source, place)
        axes = tuple(axis for axis in self.step.axes if axis not in source.copied)
        return Region(self._box(target, place), whole).take, self._collect(target, whole, place, axes)

    def _gather(self, place: Coordinates) -> tuple[Move, Move]:
        source, target = self.step.source, self.step.target
        whole = self._box(target, place)
        collect = self._collect(source, whole, place, self.step.axes)
        assert collect.disjoint, f"parts that overlap cannot be gathered: {self.step}"
        return collect, Region(self._box(source, place), whole).take

    def _reduce_scatter(self, place: Coordinates) -> tuple[Move, Move]:
        source, target = self.step.source, self.step.target
        collect = self._collect(target, self._box(source, place), place, self.step.axes)
        return collect.transposed, collect

    def _move(self, place: Coordinates) -> tuple[Move, Move]:
        source, target, axes = self.step.source, self.step.target, self.step.axes
        assert set(axes) <= source.split_axes, f"ranks that hold the same cannot all send it: {self.step}"
        members = self._mesh.group(place, axes)
        held = [self._box(source, member) for member in members]
        wanted = [self._box(target, member) for member in members]
        positions = [self._positions(member) for member in members]
        routes = [_routes(held, positions, box, receiver) for receiver, box in enumerate(wanted)]
        group, index = self._groups.of(axes), members.index(place)
        exchange = Exchange(held, wanted, lambda sender, receiver: routes[receiver](sender), group, index)
        return exchange, exchange.transposed

    def _positions(self, place: Coordinates) -> tuple[int, ...]:
        """Which part of every dimension, in the order of memory, a rank holds before the step."""
        splits = (self.step.source.split(dim) for dim in self._order)
        return tuple(self._mesh.index(place, split.axes) if split else 0 for split in splits)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer, ctx.layer = transfer, current.layer
        return transfer.forward(x)

    @staticmethod
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


def redistribute(
    steps: Sequence[Step],
    mesh: Mesh,
    coordinates: Coordinates,
    groups: Groups,
    shape: Sequence[int],
    channels_last: bool = False,
) -> Move:
    """The steps of one tensor on one rank; arguments as for `Transfer`."""
    return chained([Transfer(step, mesh, coordinates, groups, shape, channels_last) for step in steps])
