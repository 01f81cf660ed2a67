"""What the table states is what happens: the same thing measured twice differs by less, in 95 of 100 cases."""

import statistics

import numpy as np
import pytest

from convoy.bench.results import repeatability


@pytest.mark.parametrize("rounds", [3, 5, 9, 20])
def test_the_same_measured_twice_differs_by_less(rounds: int) -> None:
    random = np.random.default_rng(rounds)
    within = 0
    for _ in range(4000):
        one, other = random.normal(100, 3, (2, rounds))
        spread = repeatability(one)
        assert spread is not None
        within += abs(statistics.median(one) - statistics.median(other)) < spread
    assert 0.90 < within / 4000 < 0.99


def test_the_check_notices_another_thing() -> None:
    random = np.random.default_rng(0)
    pairs = [(random.normal(100, 1, 5), random.normal(105, 1, 5)) for _ in range(500)]
    apart = sum(abs(statistics.median(a) - statistics.median(b)) > (repeatability(a) or 0) for a, b in pairs)
    assert apart > 400


def test_one_round_says_nothing() -> None:
    assert repeatability([1.0]) is None
    assert repeatability([2.0, 2.0]) == 0
