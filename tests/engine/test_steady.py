"""Measurements end when enough of them are near the fastest, and count from the first of these on."""

import pytest

from convoy.engine.profiling import middle_half, steady


@pytest.mark.parametrize(
    ("seconds", "counting", "used"),
    [
        ((5.0, 1.0, 1.01, 1.02, 9.0), [1.0, 1.01, 1.02], 4),  # the first found cold memory
        ((5.0, 2.0, 1.0, 1.5, 1.02, 1.01, 9.0), [1.0, 1.5, 1.02, 1.01], 6),  # three near 2 would not have been enough
        ((1.0, 1.0, 1.0, 9.0), [1.0, 1.0, 1.0], 3),
        ((8.0, 4.0, 2.0, 1.0), [1.0], 4),  # never steady: what was best
    ],
)
def test_what_counts(seconds: tuple[float, ...], counting: list[float], used: int) -> None:
    values = iter(seconds)
    found = steady(lambda: next(values), lambda value: value, most=min(10, used))
    assert found == counting
    assert len(seconds) - len(list(values)) == used


def test_ends_only_when_all_agree() -> None:
    answers = iter((False, False, True))
    assert len(steady(lambda: 1.0, lambda value: value, lambda done: next(answers), enough=1)) == 3


def test_two_are_enough_where_each_takes_long() -> None:
    values = iter((8.0, 4.0, 2.0, 1.0))
    assert steady(lambda: next(values), lambda value: value, patience_s=0.0) == [4.0]
    values = iter((8.0, 4.0, 2.0, 1.0))
    assert steady(lambda: next(values), lambda value: value, patience_s=60.0, most=4) == [1.0]


def test_two_are_not_enough_while_memory_grows() -> None:
    values, grows = iter((8.0, 4.0, 2.0, 1.0)), iter((True, False))
    assert steady(lambda: next(values), lambda value: value, patience_s=0.0, settled=lambda: not next(grows)) == [2.0]


def test_the_middle_half() -> None:
    assert middle_half([3.0, 1.0, 2.0], float) == [1.0, 2.0, 3.0]  # of three nothing is left out
    assert middle_half([9.0, 1.0, 3.0, 2.0], float) == [2.0, 3.0]
    assert middle_half([5.0, 9.0, 1.0, 8.0, 4.0, 2.0, 7.0, 3.0], float) == [3.0, 4.0, 5.0, 7.0]
