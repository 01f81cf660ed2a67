"""Bytes that ranks send, against counts over single elements."""

import itertools
import math
import random

import pytest
import torch

from convoy.plans.layout import Layout, Split, balanced, indices
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from convoy.plans.traffic import (
    Traffic,
    all_reduce_elements,
    cut_traffic,
    gradient_traffic,
    step_elements,
    transfer_traffic,
)
from convoy.plans.transfer import transfer
from plans.made_graph import Chain, in_stages, placed, small_net

SHAPE = (4, 6, 5)


def _held(layout, mesh, place):
    return set(itertools.product(*(layout.parts(dim, mesh, place, size) for dim, size in enumerate(SHAPE))))


def _layouts(mesh, rng, given: bool):
    """A random layout: of a result (disjoint parts, maybe partial), or of what a layer asks for (maybe overlapping)."""
    splits, partial, copied = {}, set(), set()
    free = list(mesh.axes)
    for axis in mesh.axes:
        choice = rng.choice(["whole", "partial" if given else "copied", 0, 1, 2])
        if choice == "partial":
            partial.add(axis)
        elif choice == "copied":
            copied.add(axis)
        elif choice != "whole" and choice not in splits and axis in free:
            parts = list(balanced(SHAPE[choice], mesh.sizes[axis]))
            if choice == 1 and rng.random() < 0.5:
                numbers = list(range(SHAPE[1]))
                rng.shuffle(numbers)
                parts = [indices(sorted(numbers[part.start : part.stop])) for part in parts]
            elif choice == 2 and not given and rng.random() < 0.5:
                parts = [range(max(0, part.start - 1), min(SHAPE[2], part.stop + 1)) for part in parts]
            splits[choice] = Split((axis,), tuple(parts))
    return Layout.of(splits, partial, copied)


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2), (3, 2)])
def test_what_is_sent_is_what_is_missing(sizes):
    rng = random.Random(sum(sizes))
    mesh = Mesh(tuple(f"a{axis}" for axis in range(len(sizes))), sizes)
    places = [mesh.coordinates(rank) for rank in range(mesh.num_devices)]
    kinds = set()
    for _ in range(150):
        for step in transfer(_layouts(mesh, rng, True), _layouts(mesh, rng, False), mesh, SHAPE):
            kinds.add(step.kind)
            count = mesh.size(step.axes)
            sent = [step_elements(step, mesh, place, SHAPE) for place in places]
            before = [_held(step.source, mesh, place) for place in places]
            after = [_held(step.target, mesh, place) for place in places]
            forward, backward = sum(each.forward for each in sent), sum(each.backward for each in sent)
            if step.kind in ("gather", "move"):
                assert forward == sum(len(b - a) for a, b in zip(before, after, strict=True))
            if step.kind == "gather":
                assert backward == 0
            if step.kind == "slice":
                assert forward == 0
                assert backward == (count - 1) * sum(map(len, after))
            if step.kind == "reduce_scatter":
                assert forward == backward == sum(len(a - b) for a, b in zip(before, after, strict=True))
            if step.kind == "move":
                assert backward == forward
            if step.kind in ("reduce", "copy"):
                numbers = [all_reduce_elements(len(a), count) for a in before]
                assert [each.forward + each.backward for each in sent] == numbers
                assert (forward == 0) == (step.kind == "copy")
    assert kinds >= {"reduce", "copy", "slice", "gather", "move"}
    assert "reduce_scatter" in kinds


def test_an_all_reduce_sends_nearly_twice_the_tensor():
    assert [all_reduce_elements(1200, count) for count in (1, 2, 3, 4)] == [0, 1200, 1600, 1800]
    assert all_reduce_elements(1, 3) == 2


def _sums(placement):
    forward = backward = 0
    for sent in transfer_traffic(placement):
        forward += sent.ranks[0].forward
        backward += sent.ranks[0].backward
    return forward, backward


def test_data_parallel_sends_only_gradients():
    placement = placed(small_net(), "sample=2")
    assert _sums(placement) == (0, 0)
    gradients = gradient_traffic(placement)
    assert {name: numbers[0] for name, numbers in gradients.items()} == {
        value.name: 4 * math.prod(value.shape) for value in placement.graph.parameters()
    }


def test_filter_parallel_sends_only_activations():
    placement = placed(small_net(), "filter=2")
    assert gradient_traffic(placement) == {}
    half = [8 * number // 2 * 4 for number in (8 * 16 * 16, 12 * 8 * 8, 20, 10)]
    assert _sums(placement) == (sum(half), sum(half[:3]))


def test_filter_then_channel_needs_one_reduction():
    graph = Chain(8, 16).linear("a", 32).relu("b").linear("c", 12).graph()
    pair = placed(graph, {"mesh": {"x": 2}, "layers": {"a": {"x": "filter"}, "c": {"x": "channel"}}})
    assert _sums(pair) == (8 * 12 * 4, 0)
    both = placed(graph, "filter=2")
    assert _sums(both)[0] > _sums(pair)[0]


def test_groups_stay_on_their_rank():
    graph = Chain(8, 4, 9, 9).conv("a", 8).conv("b", 8, groups=4).conv("c", 8, groups=8).graph()
    placement = placed(graph, "filter=2")
    assert [sent.call for sent in transfer_traffic(placement) if sent.ranks[0].forward] == [""]


def test_rows_send_their_halo():
    placement = placed(Chain(8, 4, 9, 9).conv("a", 6).conv("b", 6).graph(), "height=3")
    halo = [sent for sent in transfer_traffic(placement) if sent.call.startswith("b")]
    row = 8 * 6 * 9 * 4
    assert [each.ranks for each in halo] == [(Traffic(row, row), Traffic(2 * row, 2 * row), Traffic(row, row))]


def test_images_need_no_gradient_and_evaluation_none_at_all():
    graph = Chain(8, 4, 9, 9).conv("a", 6).relu("r").conv("b", 6).graph()
    placement = placed(graph, "filter=2")
    assert next(sent for sent in transfer_traffic(placement) if sent.value == "x").ranks[0] == Traffic()
    evaluated = placed(Chain(8, 4, 9, 9, training=False).conv("a", 6).conv("b", 6).graph(), "sample=2,filter=2")
    assert sum(each.backward for sent in transfer_traffic(evaluated) for each in sent.ranks) == 0
    assert gradient_traffic(evaluated) == {}


def test_a_value_goes_once_to_all_who_want_it_alike():
    chain = Chain(8, 4, 9, 9).conv("a", 6)
    first = chain.last
    chain.conv("b", 6)
    chain.last = first
    placement = placed(chain.conv("c", 6).graph(), "filter=2")
    moved = [sent for sent in transfer_traffic(placement) if sent.value == first]
    assert len(moved) == 1


def test_bytes_follow_the_type():
    graph = small_net()
    double = {
        name: value.__class__(value.name, value.shape, torch.float64, value.origin)
        for name, value in graph.values.items()
    }
    wide = graph.__class__(graph.calls, double, graph.inputs, graph.output, {}, True)
    assert _sums(placed(wide, "filter=2")) == tuple(2 * number for number in _sums(placed(graph, "filter=2")))


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("stage=2", [(3072, 0), (0, 3072)]),
        ("stage=2,sample=2", [(1536, 0), (1536, 0), (0, 1536), (0, 1536)]),
        ("sample=2,stage=2", [(1536, 0), (0, 1536), (1536, 0), (0, 1536)]),
        ("stage=2,replicate=2", [(3072, 0), (3072, 0), (0, 3072), (0, 3072)]),
    ],
)
def test_stages_send_what_they_have_of_a_value_at_a_cut(plan, ranks):
    """8 samples of 12 channels of 8 × 8 numbers, in the layout in which they are made."""
    sizes = Plan.parse(plan)
    placement, staged = in_stages(small_net(), Plan(sizes.mesh, sizes.layers, ("classifier",)))
    (crossed,) = cut_traffic(placement, staged)
    assert (crossed.crossing.source, crossed.crossing.target) == (0, 1)
    expected = tuple(Traffic(8 * forward, 8 * backward) for forward, backward in ranks)
    assert crossed.ranks == expected


def test_what_needs_no_gradient_has_none_to_send_back():
    placement, staged = in_stages(Chain(8, 4, 9, 9, training=False).conv("a", 6).conv("b", 6).graph(), "stage=2")
    assert [crossed.ranks for crossed in cut_traffic(placement, staged)] == [(Traffic(8 * 6 * 81 * 4), Traffic())]
