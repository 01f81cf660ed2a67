"""Layouts of tensors, the steps between them, what these send, and the order of stages: against single elements."""

import itertools
import random
from collections.abc import Sequence

import pytest

from convoy.plans.layout import (
    Indices,
    Layout,
    Split,
    balanced,
    common,
    indices,
    proportional,
    united,
    without,
)
from convoy.plans.mesh import Mesh
from convoy.plans.schedule import SCHEDULES, Schedule, actions, in_flight, taken_back
from convoy.plans.traffic import all_reduce_elements, step_elements
from convoy.plans.transfer import transfer

SHAPE = (4, 6, 5)


def test_indices_are_sets_in_order() -> None:
    draw = random.Random(0)

    def some() -> Indices:
        low, high = sorted(draw.sample(range(10), 2))
        return range(low, high) if draw.random() < 0.6 else indices(sorted(draw.sample(range(10), draw.randint(0, 5))))

    for _ in range(300):
        first, second, third = some(), some(), some()
        for result, elements in (
            (common(first, second), {*first} & {*second}),
            (without(first, second), {*first} - {*second}),
            (united((first, second, third)), {*first, *second, *third}),
        ):
            assert result == indices(sorted(elements)), (first, second, third)


def test_shares_are_whole_and_as_near_to_their_weights_as_can_be() -> None:
    draw = random.Random(1)
    for _ in range(200):
        ratios = [draw.random() + 0.5 for _ in range(draw.randint(1, 5))]
        shares = proportional(total := draw.randint(20, 60), ratios)
        assert sum(shares) == total
        assert all(abs(n - total * w / sum(ratios)) < 1 for n, w in zip(shares, ratios, strict=True))
    assert proportional(4, (9, 1, 1)) == (2, 1, 1)  # none is zero


def random_layout(mesh: Mesh, draw: random.Random, is_asked: bool) -> Layout:
    """Of a result (disjoint parts, maybe partial or copied), or of what a layer asks for (maybe overlapping)."""
    splits, partial, copied = {}, set(), set()
    for axis in mesh.axes:
        choice = draw.choice(["whole", "copied", *(() if is_asked else ("partial",)), 0, 1, 2])
        if choice == "partial":
            partial.add(axis)
        elif choice == "copied":
            copied.add(axis)
        elif isinstance(choice, int) and choice not in splits:
            parts: list[Indices] = list(balanced(SHAPE[choice], mesh.sizes[axis]))
            if choice == 1 and draw.random() < 0.5:
                numbers = draw.sample(range(SHAPE[1]), SHAPE[1])
                parts = [indices(sorted(numbers[part[0] : part[-1] + 1])) for part in parts]
            elif choice == 2 and is_asked and draw.random() < 0.5:
                parts = [range(max(0, part[0] - 1), min(SHAPE[2], part[-1] + 2)) for part in parts]
            splits[choice] = Split((axis,), tuple(parts))
    return Layout.of(splits, partial, copied)


def held(layout: Layout, mesh: Mesh, place: Sequence[int]) -> set[tuple[int, ...]]:
    return set(itertools.product(*(layout.parts(dim, mesh, place, size) for dim, size in enumerate(SHAPE))))


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2), (3, 2)])
def test_steps_lead_to_the_target_and_send_what_is_missing(sizes: tuple[int, ...]) -> None:
    """Element by element: the peers of a rank hold what it takes, and what it takes is what is sent."""
    draw, kinds = random.Random(sum(sizes)), set()
    mesh = Mesh(tuple(f"a{axis}" for axis in range(len(sizes))), sizes)
    places = [mesh.coordinates(rank) for rank in range(mesh.num_devices)]
    for _ in range(150):
        layout, target = random_layout(mesh, draw, False), random_layout(mesh, draw, True)
        for step in transfer(layout, target, mesh, SHAPE):
            assert step.source == layout and step.axes
            kinds.add(step.kind)
            count, layout = mesh.size(step.axes), step.target
            sent = [step_elements(step, mesh, place, SHAPE) for place in places]
            before, after = ([held(one, mesh, place) for place in places] for one in (step.source, step.target))
            for place, elements in zip(places, after, strict=True):
                peers = [places.index(tuple(peer)) for peer in mesh.group(place, step.axes)]
                assert elements <= set().union(*(before[peer] for peer in peers)), step
            pairs = list(zip(before, after, strict=True))
            gains, losses = sum(len(b - a) for a, b in pairs), sum(len(a - b) for a, b in pairs)
            reduced = sum(all_reduce_elements(len(a), count) for a, _ in pairs)
            collected = (count - 1) * sum(map(len, after)) if not step.source.copied & set(step.axes) else 0
            assert (sum(one.forward for one in sent), sum(one.backward for one in sent)) == {
                "gather": (gains, 0),
                "move": (gains, gains),
                "slice": (0, collected),
                "reduce_scatter": (losses, losses),
                "reduce": (reduced, 0),
                "copy": (0, reduced),
                "keep": (0, 0),
            }[step.kind], step
        assert layout == target
    assert kinds == {"reduce", "copy", "keep", "slice", "gather", "move", "reduce_scatter"}
    assert [all_reduce_elements(1200, count) for count in (1, 2, 3, 4)] == [0, 1200, 1600, 1800]


def test_a_copied_tensor_is_divided_in_one_step() -> None:
    """Its gradient is a share on each rank already: nothing is kept or added first."""
    samples = Layout.of({0: Split((0,), balanced(4, 2))})
    assert [step.kind for step in transfer(Layout.of(copied=[0]), samples, Mesh(("a",), (2,)), SHAPE)] == ["slice"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_part_goes_forward_then_back_in_order_and_no_stage_waits_for_ever(schedule: Schedule) -> None:
    for stages, parts in itertools.product((1, 2, 4), (1, 2, 5, 9)):
        orders = [actions(schedule, parts, stage, stages) for stage in range(stages)]
        done: list[set[tuple[str, int]]] = [set() for _ in range(stages)]
        for stage, order in enumerate(orders):
            running, most, weights, backward = 0, 0, -1, -1
            for kind, part in order:
                if kind == "forward":
                    assert taken_back(schedule, parts, stage, stages, part) == backward + 1
                if kind == "weights":
                    assert weights < part <= backward
                    weights = part
                else:
                    running += 1 if kind == "forward" else -1
                    backward = part if kind == "backward" else backward
                most = max(most, running)
            for kind in ("forward", "backward"):
                assert [part for each, part in order if each == kind] == list(range(parts))
            assert weights == (parts - 1 if schedule == "zero-bubble" else -1)
            assert most <= in_flight(schedule, parts, stage, stages)
            assert schedule == "zero-bubble" or most == in_flight(schedule, parts, stage, stages)
        while any(orders):
            ready = []
            for stage, order in enumerate(orders):
                before = {"forward": stage - 1, "backward": stage + 1}.get(order[0][0], -1) if order else None
                if before is not None and (before not in range(stages) or order[0] in done[before]):
                    ready.append(stage)
            assert ready, (stages, parts)
            for stage in ready:
                done[stage].add(orders[stage].pop(0))
