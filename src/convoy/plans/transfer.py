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
    """The steps from one layout of a tensor to another, none where they are the same.

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

    Args:
        source: layout that a layer gives; only a parameter's may be `copied`.
        target: layout that a layer needs.
        mesh: the devices.
        shape: shape of the whole tensor.
    """
    return tuple(_Walk(source, mesh, shape).to(target))


class _Walk:
    def __init__(self, source: Layout, mesh: Mesh, shape: Sequence[int]) -> None:
        self.here = source
        self.mesh = mesh
        self.shape = shape

    def to(self, target: Layout) -> Iterator[Step]:
        assert target.partial <= self.here.partial, f"cannot make {target} of {self.here}"
        if self.here.copied:
            yield from self._keep(target)
        if self.here.partial:
            yield from self._reduce(target)
        if target.splits:
            yield from self._slice(target)
        if target.copied:
            yield from self._copy(target)
        if self.here.splits != target.splits:
            yield from self._move(target)
            yield from self._gather(target)
        assert self.here == target, f"{self.here} is not {target}"

    def _step(self, kind: Kind, axes: Iterable[int], after: Layout) -> Iterator[Step]:
        before, self.here = self.here, after
        yield Step(kind, tuple(sorted(axes)), before, after)

    def _keep(self, target: Layout) -> Iterator[Step]:
        """Axes on which the gradient would be added although the layer gives all of it on every rank."""
        axes = self.here.copied - target.copied - target.split_axes
        if axes:
            yield from self._step("keep", axes, replace(self.here, copied=self.here.copied - axes))

    def _reduce(self, target: Layout) -> Iterator[Step]:
        for dim, wanted in target.splits:
            new = set(wanted.axes) - set(self._axes(dim))
            if new and new <= self.here.partial - target.partial and self._refines(dim, wanted) and _disjoint(wanted):
                after = replace(self._with(dim, wanted), partial=self.here.partial - new)
                yield from self._step("reduce_scatter", new, after)
        axes = self.here.partial - target.partial
        if axes:
            yield from self._step("reduce", axes, replace(self.here, partial=self.here.partial - axes))

    def _slice(self, target: Layout) -> Iterator[Step]:
        """Divide over axes on which the tensor is whole, before anything is sent."""
        for dim, wanted in target.splits:
            new = set(wanted.axes) - self.here.split_axes
            if not new:
                continue
            exact = set(wanted.axes) <= {*self._axes(dim), *new} and self._refines(dim, wanted)
            after = self._with(dim, wanted) if exact else self._intersected(dim, wanted, new)
            yield from self._step("slice", new, replace(after, copied=after.copied - new) if after.copied else after)

    def _copy(self, target: Layout) -> Iterator[Step]:
        axes = target.copied - self.here.copied - self.here.split_axes
        if axes:
            yield from self._step("copy", axes, replace(self.here, copied=self.here.copied | axes))

    def _move(self, target: Layout) -> Iterator[Step]:
        """Exchange over all axes of the dimensions that are divided otherwise before and after."""
        before, wanted = dict(self.here.splits), dict(target.splits)
        changed = {dim for dim in (*before, *wanted) if before.get(dim) != wanted.get(dim)}
        axes = {axis for splits in (before, wanted) for dim in changed if dim in splits for axis in splits[dim].axes}
        if not axes & target.split_axes - self._settled(target, changed):
            return
        splits = {dim: split for dim, split in before.items() if dim not in changed}
        splits |= {dim: split for dim, split in wanted.items() if dim in changed}
        after = Layout.of(splits, self.here.partial, self.here.copied | (axes - target.split_axes))
        left = after.copied - target.copied
        if left:  # axes that end whole with a whole gradient: gather them first, then exchange over the others
            yield from self._gather(target, left)
            yield from self._move(target)
            return
        yield from self._step("move", axes, after)

    def _settled(self, target: Layout, changed: set[int]) -> set[int]:
        """Axes of dimensions that only need a gather."""
        found: set[int] = set()
        for dim in changed:
            wanted = target.split(dim)
            if wanted is None or self._collects(dim, wanted):
                found |= set(_axes(target, dim))
        return found

    def _gather(self, target: Layout, only: frozenset[int] | None = None) -> Iterator[Step]:
        for dim, split in self.here.splits:
            wanted = target.split(dim)
            old = set(split.axes) - (set(wanted.axes) if wanted else set())
            if only is not None:
                old &= only
            if not old:
                continue
            for copied in (True, False):
                axes = {axis for axis in old if (axis in target.copied) == copied}
                if not axes:
                    continue
                after = self._with(dim, self._united(dim, axes, wanted))
                after = replace(after, copied=after.copied | axes) if copied else after
                yield from self._step("move" if copied else "gather", axes, after)

    def _axes(self, dim: int) -> Axes:
        return _axes(self.here, dim)

    def _with(self, dim: int, split: Split | None) -> Layout:
        splits = dict(self.here.splits)
        splits.pop(dim, None)
        if split is not None:
            splits[dim] = split
        return Layout.of(splits, self.here.partial, self.here.copied)

    def _refines(self, dim: int, wanted: Split) -> bool:
        return _refines(self.mesh, self.shape[dim], self.here.split(dim), wanted)

    def _collects(self, dim: int, wanted: Split) -> bool:
        return _collects(self.mesh, self.shape[dim], self.here.split(dim), wanted)

    def _intersected(self, dim: int, wanted: Split, new: set[int]) -> Layout:
        here = self.here.split(dim)
        return self._with(dim, _intersected(self.mesh, self.shape[dim], here, wanted, frozenset(new)))

    def _united(self, dim: int, axes: set[int], wanted: Split | None) -> Split | None:
        here = self.here.split(dim)
        assert here is not None
        return _united(self.mesh, self.shape[dim], here, frozenset(axes), wanted)


# What follows looks at one dimension alone, so that a search over many layouts asks for the same again and again.


@lru_cache(maxsize=1 << 14)
def _refines(mesh: Mesh, size: int, here: Split | None, wanted: Split) -> bool:
    """Whether every rank already holds what it wants of a dimension."""
    if here is not None and not set(here.axes) <= set(wanted.axes):
        return False
    return here is None or all(
        _within(_part(mesh, size, wanted, place), _part(mesh, size, here, place))
        for place in _places(mesh, wanted.axes)
    )


@lru_cache(maxsize=1 << 14)
def _collects(mesh: Mesh, size: int, here: Split | None, wanted: Split) -> bool:
    """Whether the groups that give a dimension up together hold what each of their ranks wants."""
    if here is None or not set(wanted.axes) <= set(here.axes):
        return False
    old = tuple(axis for axis in here.axes if axis not in wanted.axes)
    unions = _unions(mesh, size, here, here.axes, old)
    return bool(old) and all(
        _within(unions[place], part := _part(mesh, size, wanted, place)) and _within(part, unions[place])
        for place in _places(mesh, here.axes)
    )


@lru_cache(maxsize=1 << 14)
def _intersected(mesh: Mesh, size: int, here: Split | None, wanted: Split, new: frozenset[int]) -> Split:
    """Every rank keeps what it will want of what it holds; ranks that hold the same share the rest evenly."""
    own = here.axes if here is not None else ()
    axes = tuple(sorted({*own, *new}))
    group = tuple(sorted(new))
    other = tuple(axis for axis in wanted.axes if axis not in axes)
    needed_elsewhere = bool(set(own) & set(wanted.axes))
    unions = _unions(mesh, size, wanted, axes, other)
    found: dict[Coordinates, Indices] = {}
    for first in _places(mesh, tuple(axis for axis in axes if axis not in new)):
        peers = mesh.group(first, group)
        held = _part(mesh, size, here, first)
        kept = [common(held, unions[peer]) for peer in peers]
        rest = without(held, united(kept)) if needed_elsewhere else range(0)
        for index, peer in enumerate(peers):
            part = kept[index]
            if needed_elsewhere:
                share = rest[len(rest) * index // len(kept) : len(rest) * (index + 1) // len(kept)]
                part = united([part, indices(share)])
            found[peer] = part
    return Split(axes, tuple(found[place] for place in _places(mesh, axes)))


@lru_cache(maxsize=1 << 14)
def _united(mesh: Mesh, size: int, here: Split, axes: frozenset[int], wanted: Split | None) -> Split | None:
    """What is left of a split when the groups over some of its axes collect their parts."""
    left = tuple(axis for axis in here.axes if axis not in axes)
    if wanted is not None and left == wanted.axes and _collects(mesh, size, here, wanted):
        return wanted
    if not left:
        return None
    unions = _unions(mesh, size, here, left, tuple(sorted(axes)))
    return Split(left, tuple(unions[place] for place in _places(mesh, left)))


def _unions(mesh: Mesh, size: int, split: Split | None, axes: Axes, over: Axes) -> dict[Coordinates, Indices]:
    """For every place on `axes`, what the ranks of its group over other axes hold together."""
    found: dict[Coordinates, Indices] = {}
    for place in _places(mesh, axes):
        if place not in found:
            members = mesh.group(place, over)
            union = united(_part(mesh, size, split, member) for member in members)
            found |= dict.fromkeys((member for member in members), union)
    return found


def _part(mesh: Mesh, size: int, split: Split | None, place: Coordinates) -> Indices:
    return range(size) if split is None else split.parts[mesh.index(place, split.axes)]


def _axes(layout: Layout, dim: int) -> Axes:
    split = layout.split(dim)
    return split.axes if split else ()


def _places(mesh: Mesh, axes: Axes) -> list[Coordinates]:
    return mesh.group((0,) * len(mesh.sizes), axes)


def _within(part: Indices, whole: Indices) -> bool:
    return len(common(part, whole)) == len(part)


def _disjoint(split: Split) -> bool:
    return len(united(split.parts)) == sum(len(part) for part in split.parts)
