"""Redistribution: the steps that take an activation from the layout it has to the layout that a layer asks for.

Every step moves values one way in the forward pass and gradients the other way in the backward pass, as conjugate
pairs (Shoeybi et al., Megatron-LM, 2019, figure 3; Hewett and Grady, DistDL, 2020):

| step           | forward                                  | backward                                        |
| -------------- | ---------------------------------------- | ----------------------------------------------- |
| reduce         | partial → whole: add over the group      | nothing                                         |
| copy           | whole → copied: nothing                  | add over the group                              |
| keep           | copied → whole: nothing                  | first rank keeps its gradient, others zero      |
| slice          | whole → split: take the own part         | collect the parts                               |
| gather         | split → whole: collect the parts         | take the own part                               |
| move           | split → split or copied: send each rank  | send every gradient back to its owner, add      |
|                | what it asks for                         | there                                           |
| reduce_scatter | partial → split: add, keep the own part  | collect the parts                               |
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from convoy.plans.layout import Indices, Layout, Split, common, indices, united, without
from convoy.plans.mesh import Axes, Coordinates, Mesh

Kind = Literal["reduce", "copy", "keep", "slice", "gather", "move", "reduce_scatter"]


@dataclass(frozen=True)
class Step:
    """One communication over the groups of `axes`; `source` and `target` are the layouts before and after it."""

    kind: Kind
    axes: Axes
    source: Layout
    target: Layout


def transfer(source: Layout, target: Layout, mesh: Mesh, shape: Sequence[int]) -> tuple[Step, ...]:
    """The steps from one layout of a tensor of the whole `shape` to another, none where they are the same. Only a
    parameter's may be `copied` in the source.

    A layer divided by `channel` gives a partial sum. If the next layer is divided by `sample`, one step adds the terms
    and leaves each rank its samples; if the next layer needs the tensor whole, one step adds:

    >>> mesh = Mesh(("gpu",), (2,))
    >>> partial, samples = Layout.of(partial=[0]), Layout.of({0: Split((0,), (range(4), range(4, 8)))})
    >>> [step.kind for step in transfer(partial, samples, mesh, shape=(8, 10))]
    ['reduce_scatter']
    >>> [step.kind for step in transfer(partial, Layout(), mesh, shape=(8, 10))]
    ['reduce']
    >>> [step.kind for step in transfer(samples, Layout(), mesh, shape=(8, 10))]
    ['gather']
    """
    return tuple(_Walk(source, mesh, shape).to(target))


class _Walk:
    def __init__(self, source: Layout, mesh: Mesh, shape: Sequence[int]) -> None:
        self.layout, self.mesh, self.shape = source, mesh, shape

    def to(self, target: Layout) -> Iterator[Step]:
        assert target.partial <= self.layout.partial, f"cannot make {target} of {self.layout}"
        # axes on which the gradient would be added although the layer gives all of it on every rank
        if axes := self.layout.copied - target.copied - target.split_axes:
            yield self._step("keep", axes, replace(self.layout, copied=self.layout.copied - axes))
        if self.layout.partial:
            yield from self._reduce(target)
        if target.splits:
            yield from self._slice(target)
        if axes := target.copied - self.layout.copied - self.layout.split_axes:
            yield self._step("copy", axes, replace(self.layout, copied=self.layout.copied | axes))
        if self.layout.splits != target.splits:
            yield from self._move(target)
            yield from self._gather(target)
        assert self.layout == target, f"{self.layout} is not {target}"

    def _step(self, kind: Kind, axes: Iterable[int], after: Layout) -> Step:
        before, self.layout = self.layout, after
        return Step(kind, tuple(sorted(axes)), before, after)

    def _reduce(self, target: Layout) -> Iterator[Step]:
        for dim, split in target.splits:
            new_axes = set(split.axes) - set(_axes(self.layout.split(dim)))
            to_add = self.layout.partial - target.partial
            if new_axes and new_axes <= to_add and _refines(*self._dim(dim), split) and _disjoint(split):
                after = replace(self._with(dim, split), partial=self.layout.partial - new_axes)
                yield self._step("reduce_scatter", new_axes, after)
        if axes := self.layout.partial - target.partial:
            yield self._step("reduce", axes, replace(self.layout, partial=self.layout.partial - axes))

    def _slice(self, target: Layout) -> Iterator[Step]:
        """Divide over axes on which the tensor is whole, before anything is sent."""
        for dim, split in target.splits:
            new_axes = set(split.axes) - self.layout.split_axes
            if not new_axes:
                continue
            axes = {*_axes(self.layout.split(dim)), *new_axes}
            is_exact = set(split.axes) <= axes and _refines(*self._dim(dim), split)
            part = split if is_exact else _intersected(*self._dim(dim), split, frozenset(new_axes))
            after = self._with(dim, part)
            yield self._step(
                "slice", new_axes, replace(after, copied=after.copied - new_axes) if after.copied else after
            )

    def _move(self, target: Layout) -> Iterator[Step]:
        """Exchange over all axes of the dimensions whose split changes."""
        before_splits, after_splits = dict(self.layout.splits), dict(target.splits)
        dims = {dim for dim in (*before_splits, *after_splits) if before_splits.get(dim) != after_splits.get(dim)}
        axes = {axis for splits in (before_splits, after_splits) for dim in dims for axis in _axes(splits.get(dim))}
        settled = set[int]()  # axes of dimensions that only need a gather
        for dim in dims:
            split = after_splits.get(dim)
            if split is not None and _collects(*self._dim(dim), split):
                settled.update(split.axes)
        if not axes & target.split_axes - settled:
            return
        splits = {dim: split for dim, split in before_splits.items() if dim not in dims}
        splits |= {dim: split for dim, split in after_splits.items() if dim in dims}
        after = Layout.of(splits, self.layout.partial, self.layout.copied | (axes - target.split_axes))
        left_axes = after.copied - target.copied
        if left_axes:  # axes that end whole with a whole gradient: gather them first, then exchange over the others
            yield from self._gather(target, left_axes)
            yield from self._move(target)
            return
        yield self._step("move", axes, after)

    def _gather(self, target: Layout, only: frozenset[int] | None = None) -> Iterator[Step]:
        for dim, split in self.layout.splits:
            target_split = target.split(dim)
            old_axes = set(split.axes) - set(_axes(target_split))
            for copied in (True, False):
                axes = {axis for axis in old_axes if (axis in target.copied) == copied and (not only or axis in only)}
                if not axes:
                    continue
                after = self._with(dim, _united(*self._dim(dim), frozenset(axes), target_split))
                after = replace(after, copied=after.copied | axes) if copied else after
                yield self._step("move" if copied else "gather", axes, after)

    def _dim(self, dim: int) -> tuple[Mesh, int, Split | None]:
        return self.mesh, self.shape[dim], self.layout.split(dim)

    def _with(self, dim: int, split: Split | None) -> Layout:
        splits = {other: part for other, part in self.layout.splits if other != dim}
        return Layout.of(splits if split is None else splits | {dim: split}, self.layout.partial, self.layout.copied)


# What follows looks at one dimension alone, so that a search over many layouts asks for the same again and again.


@lru_cache(maxsize=1 << 14)
def _refines(mesh: Mesh, size: int, source: Split | None, target: Split) -> bool:
    """Whether every rank already holds its target part of a dimension."""
    if source is not None and not set(source.axes) <= set(target.axes):
        return False
    return source is None or all(
        _within(_part(mesh, size, target, place), _part(mesh, size, source, place))
        for place in _places(mesh, target.axes)
    )


@lru_cache(maxsize=1 << 14)
def _collects(mesh: Mesh, size: int, source: Split | None, target: Split) -> bool:
    """Whether the groups that give a dimension up together hold what each of their ranks wants."""
    if source is None or not set(target.axes) <= set(source.axes):
        return False
    axes = tuple(axis for axis in source.axes if axis not in target.axes)
    unions = _unions(mesh, size, source, source.axes, axes)
    return bool(axes) and all(
        _within(unions[place], part := _part(mesh, size, target, place)) and _within(part, unions[place])
        for place in _places(mesh, source.axes)
    )


@lru_cache(maxsize=1 << 14)
def _intersected(mesh: Mesh, size: int, source: Split | None, target: Split, new: frozenset[int]) -> Split:
    """The split where every rank keeps what it will want of what it holds; ranks that hold the same share the rest
    evenly."""
    source_axes = _axes(source)
    axes = tuple(sorted({*source_axes, *new}))
    needed_elsewhere = bool(set(source_axes) & set(target.axes))
    unions = _unions(mesh, size, target, axes, tuple(axis for axis in target.axes if axis not in axes))
    parts: dict[Coordinates, Indices] = {}
    for first in _places(mesh, tuple(axis for axis in axes if axis not in new)):
        peers = mesh.group(first, tuple(sorted(new)))
        held = _part(mesh, size, source, first)
        kept = [common(held, unions[peer]) for peer in peers]
        rest = without(held, united(kept)) if needed_elsewhere else range(0)
        for index, peer in enumerate(peers):
            share = rest[len(rest) * index // len(kept) : len(rest) * (index + 1) // len(kept)]
            parts[peer] = united([kept[index], indices(share)]) if needed_elsewhere else kept[index]
    return Split(axes, tuple(parts[place] for place in _places(mesh, axes)))


@lru_cache(maxsize=1 << 14)
def _united(mesh: Mesh, size: int, source: Split, axes: frozenset[int], target: Split | None) -> Split | None:
    """The split that is left when the groups over some of its axes collect their parts."""
    left = tuple(axis for axis in source.axes if axis not in axes)
    if target is not None and left == target.axes and _collects(mesh, size, source, target):
        return target
    if not left:
        return None
    unions = _unions(mesh, size, source, left, tuple(sorted(axes)))
    return Split(left, tuple(unions[place] for place in _places(mesh, left)))


def _unions(mesh: Mesh, size: int, split: Split, axes: Axes, over: Axes) -> dict[Coordinates, Indices]:
    """For every place on `axes`, what the ranks of its group over other axes hold together."""
    unions: dict[Coordinates, Indices] = {}
    for place in _places(mesh, axes):
        if place not in unions:
            members = mesh.group(place, over)
            unions |= dict.fromkeys(members, united(_part(mesh, size, split, member) for member in members))
    return unions


def _part(mesh: Mesh, size: int, split: Split | None, place: Coordinates) -> Indices:
    return range(size) if split is None else split.parts[mesh.index(place, split.axes)]


def _axes(split: Split | None) -> Axes:
    return split.axes if split is not None else ()


def _places(mesh: Mesh, axes: Axes) -> list[Coordinates]:
    return mesh.group((0,) * len(mesh.sizes), axes)


def _within(part: Indices, whole: Indices) -> bool:
    return len(common(part, whole)) == len(part)


def _disjoint(split: Split) -> bool:
    return len(united(split.parts)) == sum(len(part) for part in split.parts)
