"""Every redistribution gives what the target's layout says, and every backward pass is the adjoint of its forward."""

import itertools
import math
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


def layout(states, mesh: Mesh, shape=SHAPE) -> Layout:
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


def _cases(world):
    """All pairs for one axis, and one of each kind of step, also of those that only follow on others."""
    mesh = MESHES[world]
    if world == 4:
        return random.Random(0).sample(list(pairs(mesh, SHAPE)), 200)
    of_kinds = [((kind, kind), *(layout((word,), mesh) for word in words)) for kind, words in KINDS.items()]
    return [*pairs(mesh, SHAPE), *of_kinds]


class _NoGroups:
    def of(self, axes):
        return None


def test_layouts_are_connected():
    """Steps follow on one another, use an axis once, and on every rank the parts that they need are there."""
    mesh = Mesh(("a", "b"), (2, 3))
    count = 0
    for words, source, target in pairs(mesh, SHAPE):
        here = source
        for step in transfer(source, target, mesh, SHAPE):
            assert step.source == here and step.axes, words
            here = step.target
            used = [axis for _, split in here.splits for axis in split.axes] + [*here.partial, *here.copied]
            assert len(used) == len(set(used)), f"{words}: {here} uses an axis twice"
            for rank in (0, 1, 5):
                Transfer(step, mesh, mesh.coordinates(rank), _NoGroups(), SHAPE)
        assert here == target, words
        count += 1
    assert count > 900


def _missing(source: Layout, target: Layout, mesh, place):
    """How many elements of the target a rank does not hold in the source."""
    sizes = list(zip(*(found.local_shape(SHAPE, mesh, place) for found in (source, target)), strict=True))
    shared = [
        len(set(source.parts(dim, mesh, place, size)) & set(target.parts(dim, mesh, place, size)))
        for dim, size in enumerate(SHAPE)
    ]
    return math.prod(wanted for _, wanted in sizes) - math.prod(shared)


@pytest.mark.parametrize(("mesh", "limit"), [(MESHES[2], 1.0), (MESHES[3], 1.0), (MESHES[4], 1.6)])
def test_little_more_is_sent_than_is_missing(mesh, limit):
    """On one axis exactly what is missing arrives; on two a gather before an exchange may bring more."""
    places = [mesh.coordinates(rank) for rank in range(mesh.num_devices)]
    for words, source, target in pairs(mesh, SHAPE):
        if not source.partial:
            steps = [step for step in transfer(source, target, mesh, SHAPE) if step.kind in ("gather", "move")]
            sent = sum(_missing(step.source, step.target, mesh, place) for step in steps for place in places)
            assert sent <= limit * sum(_missing(source, target, mesh, place) for place in places), words


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


def _each_pair(channels_last):
    """Values are those of the target's layout, and backward passes the adjoints."""
    mesh = MESHES[dist.get_world_size()]
    groups = Groups(mesh)
    for axes in itertools.chain.from_iterable(itertools.combinations(mesh.axes, n) for n in (1, 2)):
        groups.of(axes)
    place = groups.coordinates
    whole = torch.randn(SHAPE, dtype=torch.float64)
    names, products, unequal = [], [], set()
    for words, source, target in _cases(dist.get_world_size()):
        before, after = addends(whole, source, target, mesh, place)
        steps = transfer(source, target, mesh, SHAPE)
        x = cut(before, source, mesh, place)
        x = (x.to(memory_format=torch.channels_last) if channels_last else x).requires_grad_()
        y = redistribute(steps, mesh, place, groups, SHAPE, channels_last)(x)
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


@pytest.mark.parametrize(("world", "channels_last"), [(2, True), (3, False), (4, False), (4, True)])
def test_values_are_those_of_the_target_and_backward_is_the_adjoint(world, channels_last):
    for found in run_ranks(_each_pair, world, channels_last):
        assert not any(found.values()), [name for name, is_wrong in found.items() if is_wrong]


# One redistribution of each kind on one axis, the last step of which is of that kind.
KINDS = {
    "reduce": ("partial", "whole"),
    "copy": ("whole", "copied"),
    "keep": ("copied", "whole"),
    "slice": ("whole", "dim1"),
    "gather": ("dim1", "whole"),
    "move": ("dim1", "dim0"),
    "move halo": ("dim2", "halo"),
    "move to copied": ("lists", "copied"),
    "reduce_scatter": ("partial", "dim2"),
}


def _transfer(groups, kind, shape=SHAPE):
    source, target = (layout((word,), groups.mesh, shape) for word in KINDS[kind])
    (step,) = transfer(source, target, groups.mesh, shape)
    assert step.kind == kind.split()[0]
    return Transfer(step, groups.mesh, groups.coordinates, groups, shape)


def _wrong_backwards(wrong):
    """What is noticed where backward passes add nothing of other ranks', or add once too often."""
    backward = Transfer.backward
    change = {"alone": _alone, "twice": lambda g, right: 2 * right(g)}[wrong]
    with patch.object(Transfer, "backward", lambda self, g: change(g, lambda g: backward(self, g))):
        return _each_pair(False)


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


@pytest.mark.parametrize("world", [2, 3])
def test_a_wrong_backward_is_noticed(world):
    for found in run_ranks(_wrong_backwards, world, "twice"):
        assert all(is_wrong for (_, kinds), is_wrong in found.items() if kinds)
    for found in run_ranks(_wrong_backwards, world, "alone"):
        noticed = {kinds[0] for (_, kinds), is_wrong in found.items() if len(kinds) == 1 and is_wrong}
        assert noticed >= {"copy", "slice", "move", "reduce_scatter"}


def _odd_gradients():
    """Expanded, transposed and missing gradients; in-place changes of a result; inputs in any order of memory."""
    groups = Groups(MESHES[dist.get_world_size()])
    for kind in KINDS:
        move = _transfer(groups, kind)
        x = torch.randn(move.source_shape, dtype=torch.float64).requires_grad_()
        (ones,) = torch.autograd.grad(move(x), x, torch.ones(move.target_shape, dtype=torch.float64))
        (summed,) = torch.autograd.grad(move(x).sum(), x)
        assert torch.equal(ones, summed), kind
        dims = range(len(SHAPE))[::-1]
        gradient = torch.randn(move.target_shape, dtype=torch.float64)
        (plain,) = torch.autograd.grad(move(x), x, gradient)
        (other,) = torch.autograd.grad(move(x), x, gradient.permute(*dims).contiguous().permute(*dims))
        assert torch.equal(plain, other), kind
        with torch.no_grad():
            assert torch.equal(move(x), move(x.permute(*dims).contiguous().permute(*dims))), kind
        y = move(x)
        (unused,) = torch.autograd.grad(y[:0].sum(), x)
        assert not unused.any(), kind
        try:
            y.relu_()
        except RuntimeError as error:
            assert "is a view and is being modified inplace" in str(error), kind
        else:
            (inplace,) = torch.autograd.grad(y, x, gradient)
            (outside,) = torch.autograd.grad(move(x).relu(), x, gradient)
            assert torch.equal(inplace, outside), kind


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_and_inputs_in_any_order_of_memory(world):
    run_ranks(_odd_gradients, world)


def _low_precision(dtype):
    groups = Groups(MESHES[dist.get_world_size()])
    for kind in KINDS:
        move = _transfer(groups, kind)
        x = torch.randint(-3, 4, move.source_shape).to(dtype)
        back = {}
        for to in (dtype, torch.float64):
            leaf = x.to(to).requires_grad_()
            y = move(leaf)
            (grad,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
            assert y.dtype == grad.dtype == to
            back[to] = y.detach().double(), grad.double()
        assert all(map(torch.equal, *back.values())), kind


def test_low_precision_travels_as_it_is():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        run_ranks(_low_precision, 2, dtype)


def _no_samples():
    """More ranks than samples: some hold nothing, and still take part in both directions."""
    groups = Groups(MESHES[dist.get_world_size()])
    shape = (1, 4, 3, 2)
    source, target = (layout((word,), groups.mesh, shape) for word in ("dim0", "dim1"))
    steps = transfer(source, target, groups.mesh, shape) + transfer(target, source, groups.mesh, shape)
    x = torch.ones(source.local_shape(shape, groups.mesh, groups.coordinates)).requires_grad_()
    y = redistribute(steps, groups.mesh, groups.coordinates, groups, shape)(x * 2)
    assert y.requires_grad and y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape and (x.grad == 2).all()
    return len(x)


def test_ranks_without_samples():
    assert run_ranks(_no_samples, 3) == [1, 0, 0]
