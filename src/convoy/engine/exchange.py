"""What travels within a group when a tensor changes its layout, planned once by the indices that ranks hold."""

from collections.abc import Sequence

import torch
from torch import Tensor

from convoy.engine import collectives
from convoy.engine.collectives import Group
from convoy.engine.regions import Assembly, Box, Region, extents, is_empty
from convoy.plans.layout import Indices, common, without


class Collect:
    """Every rank gives its part, all get all parts in one tensor; `transposed` adds and leaves each rank its part.

    Args:
        shape: of the tensor of all parts.
        regions: where the part of each rank of the group lies in it. Parts that overlap are added, and elements in no
            part are zero.
        group: the ranks.
        index: this rank's number in the group.
    """

    def __init__(self, shape: Sequence[int], regions: Sequence[Region], group: Group, index: int) -> None:
        self.regions = tuple(regions)
        self.mine = self.regions[index]
        self._index = index
        self._group = group
        self._assembly = Assembly(shape, regions)
        self._is_idle = sum(not region.empty for region in regions) == 0
        self._dim = self._dim_of_equal_parts()

    @property
    def disjoint(self) -> bool:
        """Whether no element is in two parts."""
        return self._assembly.disjoint

    def _dim_of_equal_parts(self) -> int | None:
        """The dimension along which parts of one shape stand in the order of the ranks, if that is how they lie."""
        dim = self._assembly.dim
        equal = all(region.shape == self.mine.shape for region in self.regions)
        return dim if equal and self._assembly.kept == list(range(len(self.regions))) else None

    def __call__(self, x: Tensor) -> Tensor:
        """From this rank's part to the tensor of all parts."""
        x = x.contiguous()
        if len(self.regions) == 1 or self._is_idle:
            return self._assembly([x] * len(self.regions))
        if self._dim is not None:
            parts = collectives.all_gather(x, self._group)
            if all(size == 1 for size in x.shape[: self._dim]):
                return parts.view(self._assembly.shape)
            return torch.cat(parts.unbind(0), self._dim)
        sends = [None if rank == self._index else x for rank in range(len(self.regions))]
        shapes = [None if rank == self._index else region.shape for rank, region in enumerate(self.regions)]
        sends[self._index] = x.new_empty(0)
        found = collectives.exchange(sends, shapes, self._group)
        found[self._index] = x
        return self._assembly(found)

    def transposed(self, x: Tensor) -> Tensor:
        """From a tensor of all parts on every rank to the sum over the ranks of this rank's part."""
        if len(self.regions) == 1 or self._is_idle:
            return self.mine.take(x)
        if self._dim is not None:
            ranks = len(self.regions)
            parts = x.unflatten(self._dim, (ranks, -1)).movedim(self._dim, 0)
            return collectives.reduce_scatter(parts.contiguous(), self._group)
        sends: list[Tensor | None] = [region.select(x) for region in self.regions]
        own = self.mine.select(x)
        sends[self._index] = x.new_empty(0)
        shapes = [None if rank == self._index else self.mine.shape for rank in range(len(self.regions))]
        found = collectives.exchange(sends, shapes, self._group)
        found[self._index] = own
        total = found[0] + found[1]
        for part in found[2:]:
            total += part
        return total


class Exchange:
    """Every rank gets the indices that it wants from ranks that hold them; `transposed` sends back and adds.

    Args:
        held: what each rank of the group has.
        wanted: what each rank of the group is to have.
        positions: which part of every dimension each rank holds. Where parts overlap, a rank takes what it holds
            itself and the rest from the first other part.
        group: the ranks.
        index: this rank's number in the group.
    """

    def __init__(
        self,
        held: Sequence[Box],
        wanted: Sequence[Box],
        positions: Sequence[tuple[int, ...]],
        group: Group,
        index: int,
    ) -> None:
        ranks = range(len(held))
        routes = [_Routes(held, positions, wanted[receiver], receiver) for receiver in ranks]
        boxes = {(sender, receiver): routes[receiver].box(sender) for sender in ranks for receiver in ranks}
        self._is_idle = all(is_empty(box) for (sender, receiver), box in boxes.items() if sender != receiver)
        self._index = index
        self._group = group
        given = [Region(boxes[index, rank], held[index]) for rank in ranks]
        taken = [Region(boxes[rank, index], wanted[index]) for rank in ranks]
        self._given = Assembly(extents(held[index]), given)
        self._taken = Assembly(extents(wanted[index]), taken)

    def __call__(self, x: Tensor) -> Tensor:
        """From what this rank has to what it wants."""
        return self._send(x, self._given, self._taken)

    def transposed(self, x: Tensor) -> Tensor:
        """From the gradient of what this rank wanted to that of what it had."""
        return self._send(x, self._taken, self._given)

    def _send(self, x: Tensor, source: Assembly, target: Assembly) -> Tensor:
        own = source.regions[self._index].select(x)
        if self._is_idle:
            return target([own] * len(target.regions))
        sends = [None if region.empty else region.select(x) for region in source.regions]
        sends[self._index] = x.new_empty(0)
        shapes = [None if region.empty else region.shape for region in target.regions]
        shapes[self._index] = None
        found = collectives.exchange(sends, shapes, self._group)
        found[self._index] = own
        return target(found)


class _Routes:
    """From whom one rank gets what it wants."""

    def __init__(self, held: Sequence[Box], positions: Sequence[tuple[int, ...]], wanted: Box, receiver: int) -> None:
        self._positions = positions
        self._parts: list[dict[int, Indices]] = []
        for dim, needed in enumerate(wanted):
            parts = {place[dim]: box[dim] for place, box in zip(positions, held, strict=True)}
            own = positions[receiver][dim]
            left = needed
            found: dict[int, Indices] = {}
            for position in sorted(parts, key=lambda position: (position != own, position)):
                found[position] = common(parts[position], left)
                left = without(left, parts[position])
            assert not len(left), f"nobody in the group holds {left} of dimension {dim}"
            self._parts.append(found)

    def box(self, sender: int) -> Box:
        """What a rank sends."""
        return tuple(found[position] for found, position in zip(self._parts, self._positions[sender], strict=True))
