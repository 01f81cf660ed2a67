"""How a batch is divided: over ranks, by what they take, and in passes that exchange gradients once."""

import pytest

from convoy.engine.coupling import microbatch_sizes
from convoy.training.division import divide


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
