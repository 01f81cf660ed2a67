"""Every redistribution gives what the target's layout says, and every backward pass is the adjoint of its forward."""

import itertools
import random
import zlib
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from convoy.comm import collectives
from convoy.comm.groups import Groups
from convoy.comm.redistribution import Transfer, redistribute
from convoy.plans.layout import Layout, Split, balanced, indices
from convoy.plans.mesh import Mesh
from convoy.plans.transfer import transfer
from ranks import run_ranks

SHAPE = (5, 7, 8, 2)
MESHES = {2: Mesh(("a",), (2,)), 3: Mesh(("a",), (3,)), 4: Mesh(("a", "b"), (2, 2))}
GIVEN = ("whole", "dim0", "dim1", "lists", "dim2", "partial")
ASKED = ("whole", "copied", "dim0", "dim1", "lists", "dim2", "halo", "partial")
DIMS = {"dim0": 0, "dim1": 1, "lists": 1, "dim2": 2, "halo": 2}
# One redistribution of each kind on one axis, the last step of which is of that kind.
KINDS = {"reduce": ("partial", "whole"), "reduce_scatter": ("partial", "dim2"), "copy": ("whole", "copied")}
KINDS |= {"keep": ("copied", "whole"), "slice": ("whole", "dim1"), "gather": ("dim1", "whole")}
KINDS |= {"move": ("dim1", "dim0"), "move halo": ("dim2", "halo"), "move to copied": ("lists", "copied")}


def layout(states, mesh: Mesh, shape=SHAPE) -> Layout:
    """What each axis does: one word of GIVEN or ASKED per axis."""
    splits = {}
    for dim in range(3):
        axes = tuple(axis for axis, state in enumerate(states) if DIMS.get(state) == dim)
        if axes:
            kinds = {states[axis] for axis in axes}
            splits[dim] = Split(axes, _parts(kinds, shape[dim], mesh.size(axes)))
    kinds = ([axis for axis, state in enumerate(states) if state == kind] for kind in ("partial", "copied"))
    return Layout.of(splits, *kinds)


def _parts(kinds, size, count):
    if "lists" in kinds:
        return tuple(indices(range(size)[first::count]) for first in range(count))
    parts = balanced(size, count)
    if "halo" in kinds:
        return tuple(range(max(0, p.start - 2), min(size, p.stop + 1)) if len(p) else range(0) for p in parts)
    return parts


def pairs(mesh: Mesh):
    """All pairs of a layout that some layer gives and one that some layer asks for, with their words."""
    for given in itertools.product(GIVEN, repeat=len(mesh.sizes)):
        for asked in itertools.product(ASKED, repeat=len(mesh.sizes)):
            if all(want != "partial" or have == "partial" for have, want in zip(given, asked, strict=True)):
                yield (given, asked), layout(given, mesh), layout(asked, mesh)


def test_a_copied_tensor_is_divided_in_one_step():
    """Its gradient is a share on each rank already: nothing is kept or added first."""
    steps = transfer(layout(["copied"], MESHES[2]), layout(["dim0"], MESHES[2]), MESHES[2], SHAPE)
    assert [step.kind for step in steps] == ["slice"]


def cut(whole: torch.Tensor, how: Layout, mesh: Mesh, place) -> torch.Tensor:
    """What the rank at `place` holds of a tensor."""
    for dim, size in enumerate(whole.shape):
        whole = whole.index_select(dim, torch.tensor(list(how.parts(dim, mesh, place, size)), dtype=torch.long))
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


def _alike(how: Layout, mesh):
    """Axes on which values are identical, and axes on which gradients are."""
    plain = set(mesh.axes) - how.split_axes - how.partial - how.copied
    return plain | how.copied, plain | how.partial


def _product(gradient, value, how: Layout, mesh, place):
    """This rank's share of ⟨gradient, value⟩: on axes where both are identical only the first rank counts."""
    values, gradients = _alike(how, mesh)
    if any(place[axis] for axis in values & gradients):
        return torch.zeros((), dtype=torch.float64)
    return (gradient * value).sum()


def _gradient(words, how: Layout, mesh, place):
    """Random, but identical where it has to be."""
    same = _alike(how, mesh)[1]
    key = [0 if axis in same else coordinate for axis, coordinate in enumerate(place)]
    generator = torch.Generator().manual_seed(zlib.crc32(repr((words, key)).encode()))
    return torch.randn(how.local_shape(SHAPE, mesh, place), generator=generator, dtype=torch.float64)


def _each_pair():
    """By words and kinds of steps, whether the backward pass is not the adjoint; values are those of the target."""
    mesh = MESHES[dist.get_world_size()]
    cases = list(pairs(mesh))
    if len(mesh.sizes) > 1:
        cases = random.Random(0).sample(cases, 200)
    else:  # also steps that only follow on others
        cases += [((kind, kind), *(layout((word,), mesh) for word in words)) for kind, words in KINDS.items()]
    groups = Groups(mesh)
    for axes in itertools.chain.from_iterable(itertools.combinations(mesh.axes, n) for n in (1, 2)):
        groups.of(axes)
    place, whole = groups.coordinates, torch.randn(SHAPE, dtype=torch.float64)
    names, products, unequal = [], [], set()
    for number, (words, source, target) in enumerate(cases):
        channels_last = number % 2 == 1
        before, after = addends(whole, source, target, mesh, place)
        steps = transfer(source, target, mesh, SHAPE)
        x = cut(before, source, mesh, place)
        x = (x.to(memory_format=torch.channels_last) if channels_last else x).requires_grad_()
        y = redistribute(steps, groups, SHAPE, channels_last)(x)
        wanted = cut(after, target, mesh, place)
        assert y.shape == wanted.shape, f"{words}: {tuple(y.shape)} is not {tuple(wanted.shape)}"
        assert torch.allclose(y, wanted, rtol=0, atol=1e-12), f"{words}: other values"
        assert not (channels_last and steps) or y.is_contiguous(memory_format=torch.channels_last), words
        gradient = _gradient(words, target, mesh, place)
        (back,) = torch.autograd.grad(y, x, gradient)
        group = groups.of(tuple(_alike(source, mesh)[1]))
        if group is not None and back.numel():
            everyones = collectives.all_gather(back, group)
            unequal |= set() if all(torch.equal(other, everyones[0]) for other in everyones) else {words}
        names.append((words, tuple(step.kind for step in steps)))
        ours = _product(gradient, y.detach(), target, mesh, place)
        products.append(torch.stack([ours, _product(back, x.detach(), source, mesh, place)]))
    forward, backward = collectives.all_reduce(torch.stack(products), dist.group.WORLD).unbind(1)
    wrong = (forward - backward).abs() > 1e-10 * forward.abs().clamp(min=1)
    return {name: bad or name[0] in unequal for name, bad in zip(names, wrong.tolist(), strict=True)}


@pytest.mark.parametrize("world", MESHES)
def test_values_are_those_of_the_target_and_backward_is_the_adjoint(world):
    for cases in run_ranks(_each_pair, world):
        assert not any(cases.values()), [name for name, is_wrong in cases.items() if is_wrong]


def _wrong_backwards():
    """What is noticed where backward passes add nothing of other ranks'."""
    backward = Transfer.backward
    with patch.object(Transfer, "backward", lambda self, g: _alone(g, lambda g: backward(self, g))):
        return _each_pair()


def _alone(gradient, right):
    """The backward pass with nothing from the other ranks."""
    rank = dist.get_rank()

    def apart(x, group):
        return torch.stack([x if other == rank else torch.zeros_like(x) for other in range(group.size())])

    with (
        patch.object(collectives, "exchange", lambda x, shapes, group: [gradient.new_zeros(s or (0,)) for s in shapes]),
        patch.object(collectives, "all_gather", apart),
        patch.object(collectives, "reduce_scatter", lambda x, group: x[rank]),
        patch.object(collectives, "all_reduce", lambda x, group: x),
    ):
        return right(gradient)


def test_a_wrong_backward_is_noticed():
    for cases in run_ranks(_wrong_backwards, 3):
        noticed = {kinds[0] for (_, kinds), is_wrong in cases.items() if len(kinds) == 1 and is_wrong}
        assert noticed >= {"copy", "slice", "move", "reduce_scatter"}
