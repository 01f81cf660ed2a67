"""Ranks that plan together: what one finds all know, and what one fails with nobody waits for."""

import pytest

from convoy.errors import ConvoyError
from convoy.planning import Ranks
from ranks import run_ranks


def failing(kind: type[Exception]) -> tuple[str, str]:
    ranks = Ranks.here()

    def work() -> None:
        raise kind("no such thing")

    try:
        ranks.first(work)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (ConvoyError, ("ConvoyError", "no such thing")),
        (ValueError, ("RuntimeError", "rank 0 failed: ValueError: no such thing")),
    ],
)
def test_a_failure_of_the_first_is_one_of_all(kind: type[Exception], others: tuple[str, str]) -> None:
    first, second = run_ranks(failing, 2, kind)
    assert first == (kind.__name__, "no such thing")
    assert second == others


def agreeing() -> tuple[bool, bool]:
    ranks = Ranks.here()
    return ranks.agree(ranks.rank == 0), ranks.agree(True)


def test_all_must_agree() -> None:
    assert run_ranks(agreeing, 2) == [(False, True), (False, True)]
