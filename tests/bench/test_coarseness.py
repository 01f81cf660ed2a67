"""Parts of a batch for devices of unequal speed: what they can reach, and what is said where that is little."""

import pytest

from convoy.bench.study import best_reach, reach, too_coarse


@pytest.mark.parametrize(
    ("counts", "speeds", "share"),
    [((2, 2, 1), (1.0, 1.0, 0.5), 1.0), ((5, 5, 5), (1.0, 1.0, 0.5), 0.6), ((4, 4), (1.0, 3.0), 0.5)],
)
def test_reach(counts: tuple[int, ...], speeds: tuple[float, ...], share: float) -> None:
    assert reach(counts, speeds) == pytest.approx(share)


def test_too_few_microbatches_reach_little() -> None:
    assert best_reach(2, (1.0, 1.0, 0.5)) == 0
    assert best_reach(8, (1.0, 1.0, 0.5)) == pytest.approx(0.8)
    assert best_reach(10, (1.0, 1.0, 0.5)) == pytest.approx(1)


def test_the_sentence_names_what_to_set() -> None:
    said = too_coarse(128, 4, (0.6, 0.6, 0.3)).replace("\u202f", " ")
    assert "128 in 4 microbatches lets devices of speed 1.0 : 1.0 : 0.50 reach 80 %" in said
    assert "--set microbatches=5 allows 100 %" in said
    assert too_coarse(128, 5, (0.6, 0.6, 0.3)) == ""
    assert too_coarse(4, 4, (1.0, 0.9, 0.45)).endswith("raise --batch.")
