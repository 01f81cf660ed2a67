"""Layouts of every kind, and tensors laid out by them."""

import itertools

import torch

from convoy.plans.layout import Layout, Split, balanced, indices
from convoy.plans.mesh import Mesh

GIVEN = ("whole", "dim0", "dim1", "lists", "dim2", "partial")
ASKED = ("whole", "copied", "dim0", "dim1", "lists", "dim2", "halo", "partial")
DIMS = {"dim0": 0, "dim1": 1, "lists": 1, "dim2": 2, "halo": 2}


def layout(states, mesh: Mesh, shape) -> Layout:
    """What each axis does: one word of GIVEN or ASKED per axis."""
    splits = {}
    for dim in range(3):
        axes = tuple(axis for axis, state in enumerate(states) if DIMS.get(state) == dim)
        if axes:
            kinds = {states[axis] for axis in axes}
            splits[dim] = Split(axes, _parts(kinds, shape[dim], mesh.size(axes)))
    return Layout.of(
        splits,
        partial=[axis for axis, state in enumerate(states) if state == "partial"],
        copied=[axis for axis, state in enumerate(states) if state == "copied"],
    )


def _parts(kinds, size, count):
    if "lists" in kinds:
        return tuple(indices(range(size)[first::count]) for first in range(count))
    parts = balanced(size, count)
    if "halo" in kinds:
        return tuple(range(max(0, p.start - 2), min(size, p.stop + 1)) if len(p) else range(0) for p in parts)
    return parts


def pairs(mesh: Mesh, shape):
    """All pairs of a layout that some layer gives and one that some layer asks for, with their words."""
    for given in itertools.product(GIVEN, repeat=len(mesh.sizes)):
        for asked in itertools.product(ASKED, repeat=len(mesh.sizes)):
            if all(want != "partial" or have == "partial" for have, want in zip(given, asked, strict=True)):
                yield (given, asked), layout(given, mesh, shape), layout(asked, mesh, shape)


def cut(whole: torch.Tensor, found: Layout, mesh: Mesh, place) -> torch.Tensor:
    """What the rank at `place` holds of a tensor."""
    for dim, size in enumerate(whole.shape):
        whole = whole.index_select(dim, torch.tensor(list(found.parts(dim, mesh, place, size)), dtype=torch.long))
    return whole


def addends(whole: torch.Tensor, source: Layout, target: Layout, mesh: Mesh, place) -> tuple:
    """A rank's tensor before and after a redistribution, of random addends that make the whole."""
    axes = tuple(sorted(source.partial))
    places = mesh.group((0,) * len(mesh.sizes), axes)
    generator = torch.Generator().manual_seed(5)
    parts = {p: torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for p in places[1:]}
    parts[places[0]] = whole - sum(parts.values(), torch.zeros_like(whole))
    here = tuple(c if axis in axes else 0 for axis, c in enumerate(place))
    added = mesh.group(here, tuple(sorted(source.partial - target.partial)))
    return parts[here], sum((parts[p] for p in added), torch.zeros_like(whole))
