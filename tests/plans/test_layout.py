"""Sets of indices and shares of samples, against single elements, and the order of stages."""

import itertools
import random

import pytest

from convoy.plans.layout import Indices, common, indices, proportional, united, without
from convoy.plans.schedule import SCHEDULES, Schedule, actions, in_flight, taken_back


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
