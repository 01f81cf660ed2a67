"""How fast each rank is, told from what all of them computed."""

from typing import Any

import pytest

from convoy.planner.cost.times import Times
from convoy.planner.profiling import _of_each_rank


def _rows(**seconds: float) -> Any:
    """What a rank has measured, by names that stand for pieces."""
    return [(name, Times(each / 3, 2 * each / 3)) for name, each in seconds.items()]


def test_a_slower_rank_is_slower_in_all_it_does() -> None:
    found = _of_each_rank([_rows(a=1.0, b=2.0, c=0.5), _rows(a=2.0, b=4.0, c=1.0)], set())
    assert found[1] / found[0] == pytest.approx(2)


def test_what_has_disturbed_one_piece_says_nothing_of_the_rank() -> None:
    quiet = {"a": 1.0, "b": 2.0, "c": 0.5}
    found = _of_each_rank([_rows(**quiet | {"a": 30.0}), _rows(**quiet), _rows(**quiet)], set())
    assert found == pytest.approx((3.5, 3.5, 3.5))


def test_pieces_that_wait_for_others_are_left_out() -> None:
    found: Any = _of_each_rank([_rows(a=1.0, b=9.0), _rows(a=3.0, b=9.0)], {"b"})  # type: ignore[arg-type]
    assert found == pytest.approx((1.0, 3.0))
    assert _of_each_rank([_rows(b=9.0), _rows(b=9.0)], {"b"}) == ()  # type: ignore[arg-type]
