"""How a batch is divided: over ranks, by what they take, and in passes that exchange gradients once."""

from itertools import product
from operator import mul

import pytest

from convoy.engine.coupling import microbatch_sizes
from convoy.errors import ConvoyError
from convoy.plans.layout import proportional
from convoy.training.division import divide, soonest


def test_microbatches_of_each_rank_and_the_parts_that_end_soonest() -> None:
    rows = {
        (8, 3, None): (3, 3, 2),
        (8, 3, (3, 3, 2)): (3, 3, 2),
        (8, 2, (3, 1)): (6, 2),
        (8, 2, (100, 1)): (7, 1),
        (3, 3, (5, 1, 1)): (1, 1, 1),
    }
    assert {row: divide(microbatch_sizes(37, row[0]), row[1], row[2]).counts for row in rows} == rows
    assert proportional(10, (1.0, 1.0, 1.5)) == (3, 3, 4)
    for weights in ((1e-9, 1.0, 1.0), (5.0, 4.9, 0.1), (1.0, 1e9, 1.0)):
        counts = proportional(9, weights)
        assert sum(counts) == 9 and min(counts) >= 1
    for batch, num, ranks, shares, words in (
        (64, 2, 3, None, "a batch of 64 is 2 microbatches, and 3 devices need 3: add --microbatches 3"),
        (2, 2, 3, None, "raise --batch to at least 3"),
        (64, 8, 3, (1, 1), "--shares names 2 parts, but the plan divides the batch into 3"),
    ):
        with pytest.raises(ConvoyError, match=words):
            divide(microbatch_sizes(batch, num), ranks, shares)
    for times in ((1.0, 3.3), (2.0, 1.0, 1.5, 5.0)):
        for total in (5, 9, 13):
            counts, every = soonest(total, times), product(range(1, total), repeat=len(times))
            last = min(max(map(mul, some, times)) for some in every if sum(some) == total)
            assert sum(counts) == total and min(counts) >= 1 and max(map(mul, counts, times)) == last


@pytest.mark.parametrize("counts", [(8,), (3, 3, 2), (1, 7), (6, 1, 1)])
def test_every_sample_is_in_one_pass_of_its_rank(counts: tuple[int, ...]) -> None:
    division = divide(microbatch_sizes(37, 8), len(counts), counts)
    for merge in (1, 2, 3, 8):
        passes = division.passes(merge)
        assert len(passes) == max(-(-count // merge) for count in counts)
        for rank in range(len(counts)):
            mine = [position for piece in passes for position in piece.parts[rank]]
            assert mine == list(division.positions(rank))
            assert all(len(piece.microbatches[rank]) <= merge for piece in passes)
            assert all(sum(piece.microbatches[rank]) == len(piece.parts[rank]) for piece in passes)
        assert sorted(position for piece in passes for position in piece.positions) == list(range(37))
        assert all(division.passes(merge, late=True)[-1].parts)  # all have something where gradients are exchanged
