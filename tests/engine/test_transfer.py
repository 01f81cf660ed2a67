"""Every redistribution gives what the target's layout says, and every backward pass is the adjoint of its forward."""

import itertools
import random
import zlib

import pytest
import torch
import torch.distributed as dist

from convoy.engine import collectives
from convoy.engine.groups import Groups
from convoy.engine.transfer import redistribute
from convoy.plans.layout import Layout
from convoy.plans.mesh import Mesh
from convoy.plans.transfer import transfer
from engine import layouts
from ranks import run_ranks

SHAPE = (5, 7, 8, 2)
MESHES = {2: Mesh(("a",), (2,)), 3: Mesh(("a",), (3,)), 4: Mesh(("a", "b"), (2, 2))}


def _cases(world):
    found = list(layouts.pairs(MESHES[world], SHAPE))
    return found if world < 4 else random.Random(0).sample(found, 200)


def _equal(words, found, wanted):
    assert found.shape == wanted.shape, f"{words}: {tuple(found.shape)} is not {tuple(wanted.shape)}"
    assert torch.allclose(found, wanted, rtol=0, atol=1e-12), f"{words}: other values"


def test_layouts_are_connected():
    mesh = Mesh(("a", "b"), (2, 3))
    count = 0
    for words, source, target in layouts.pairs(mesh, SHAPE):
        here = source
        for step in transfer(source, target, mesh, SHAPE):
            assert step.source == here and step.axes, words
            here = step.target
            used = [axis for _, split in here.splits for axis in split.axes] + [*here.partial, *here.copied]
            assert len(used) == len(set(used)), f"{words}: {here} uses an axis twice"
        assert here == target, words
        count += 1
    assert count > 900


def _values(channels_last):
    mesh = MESHES[dist.get_world_size()]
    groups = Groups(mesh)
    whole = torch.randn(SHAPE, dtype=torch.float64)
    for words, source, target in _cases(dist.get_world_size()):
        before, after = layouts.addends(whole, source, target, mesh, groups.coordinates)
        steps = transfer(source, target, mesh, SHAPE)
        move = redistribute(steps, mesh, groups.coordinates, groups, SHAPE, channels_last)
        x = layouts.cut(before, source, mesh, groups.coordinates)
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        found = move(x)
        _equal(words, found, layouts.cut(after, target, mesh, groups.coordinates))
        if channels_last and steps:
            assert found.is_contiguous(memory_format=torch.channels_last), words


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("channels_last", [False, True])
def test_values_are_those_of_the_target(world, channels_last):
    run_ranks(_values, world, channels_last)


def _alike(found: Layout, mesh):
    """Axes on which values are identical, and axes on which gradients are."""
    plain = set(mesh.axes) - found.split_axes - found.partial - found.copied
    return plain | found.copied, plain | found.partial


def _product(gradient, value, found: Layout, mesh, place):
    """This rank's share of ⟨gradient, value⟩: on axes where both are identical only the first rank counts."""
    values, gradients = _alike(found, mesh)
    if any(place[axis] for axis in values & gradients):
        return torch.zeros((), dtype=torch.float64)
    return (gradient * value).sum()


def _gradient(words, found: Layout, mesh, place):
    """Random, but identical where it has to be."""
    same = _alike(found, mesh)[1]
    key = [0 if axis in same else coordinate for axis, coordinate in enumerate(place)]
    generator = torch.Generator().manual_seed(zlib.crc32(repr((words, key)).encode()))
    return torch.randn(found.local_shape(SHAPE, mesh, place), generator=generator, dtype=torch.float64)


def _check_alike(words, gradient, found: Layout, mesh, groups):
    group = groups.of(tuple(_alike(found, mesh)[1]))
    if group is not None and gradient.numel():
        everyones = collectives.all_gather(gradient, group)
        assert all(torch.equal(other, everyones[0]) for other in everyones), f"{words}: unequal gradients"


def _adjoint(channels_last):
    mesh = MESHES[dist.get_world_size()]
    groups = Groups(mesh)
    for axes in itertools.chain.from_iterable(itertools.combinations(mesh.axes, n) for n in (1, 2)):
        groups.of(axes)
    place = groups.coordinates
    whole = torch.randn(SHAPE, dtype=torch.float64)
    names, products = [], []
    for words, source, target in _cases(dist.get_world_size()):
        before, _ = layouts.addends(whole, source, target, mesh, place)
        x = layouts.cut(before, source, mesh, place).requires_grad_()
        move = redistribute(transfer(source, target, mesh, SHAPE), mesh, place, groups, SHAPE, channels_last)
        y = move(x)
        gradient = _gradient(words, target, mesh, place)
        (back,) = torch.autograd.grad(y, x, gradient)
        _check_alike(words, back, source, mesh, groups)
        names.append(words)
        products.append(
            torch.stack(
                [
                    _product(gradient, y.detach(), target, mesh, place),
                    _product(back, x.detach(), source, mesh, place),
                ]
            )
        )
    forward, backward = collectives.all_reduce(torch.stack(products), dist.group.WORLD).unbind(1)
    wrong = (forward - backward).abs() > 1e-10 * forward.abs().clamp(min=1)
    assert not wrong.any(), [name for name, bad in zip(names, wrong.tolist(), strict=True) if bad]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("channels_last", [False, True])
def test_backward_is_the_adjoint(world, channels_last):
    run_ranks(_adjoint, world, channels_last)
