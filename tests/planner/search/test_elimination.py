"""Sums over many variables, most of which have only one state left."""

import numpy as np
import pytest

from convoy.planner.search.elimination import Elimination, Table
from convoy.planner.search.fewest import fewest

SETTLED = 40
"""More variables than an array may have dimensions where arrays are combined."""


def star() -> tuple[list[Table], list[Table], dict[int, int]]:
    """One variable with three states, beside each of many that have one: seconds, counts, numbers of states."""
    generator = np.random.default_rng(0)
    seconds = [Table((0, leaf), generator.random((3, 1))) for leaf in range(1, SETTLED + 1)]
    counts = [Table((0, leaf), np.array([[0.0], [1.0], [2.0]])) for leaf in (1, 2)]
    return seconds, counts, {0: 3, **dict.fromkeys(range(1, SETTLED + 1), 1)}


def test_settled_variables_are_no_dimensions() -> None:
    seconds, _, sizes = star()
    sums = sum(table.numbers[:, 0] for table in seconds)
    found = Elimination(seconds, sizes, 1000)
    assert found.least == pytest.approx(sums.min())
    assert found.assignment() == {0: int(sums.argmin()), **dict.fromkeys(range(1, SETTLED + 1), 0)}
    marginals = found.min_marginals()
    assert marginals[0] == pytest.approx(sums)
    assert all(marginals[leaf] == pytest.approx(sums.min()) for leaf in range(1, SETTLED + 1))


def test_nor_are_they_where_something_is_counted() -> None:
    seconds, counts, sizes = star()
    sums = sum(table.numbers[:, 0] for table in seconds)
    for budget in np.sort(sums):
        wanted = int(np.flatnonzero(sums <= budget)[0])  # the states count 0, 2 and 4
        found = fewest(seconds, counts, sizes, float(budget), 4, 1000)
        assert found == {0: wanted, **dict.fromkeys(range(1, SETTLED + 1), 0)}
    assert fewest(seconds, counts, sizes, float(sums.min()) / 2, 4, 1000) is None
