import pytest

from convoy.engine.coupling import microbatch_sizes
from convoy.errors import ConvoyError
from convoy.plans.layout import proportional
from convoy.training.division import divide


@pytest.mark.parametrize(
    ("num", "ranks", "shares", "counts"),
    [
        (8, 3, None, (3, 3, 2)),
        (8, 3, (3, 3, 2), (3, 3, 2)),
        (8, 2, (3, 1), (6, 2)),
        (8, 2, (100, 1), (7, 1)),
        (7, 3, (1, 1, 1), (3, 2, 2)),
        (3, 3, (5, 1, 1), (1, 1, 1)),
    ],
)
def test_microbatches_of_each_rank(num: int, ranks: int, shares: tuple[float, ...] | None, counts: tuple) -> None:
    assert divide(microbatch_sizes(37, num), ranks, shares).counts == counts


@pytest.mark.parametrize("merge", [1, 2, 3, 8])
@pytest.mark.parametrize("counts", [(8,), (3, 3, 2), (1, 7), (6, 1, 1)])
def test_every_sample_is_in_one_pass_of_its_rank(counts: tuple[int, ...], merge: int) -> None:
    division = divide(microbatch_sizes(37, 8), len(counts), counts)
    passes = division.passes(merge)
    assert len(passes) == max(-(-count // merge) for count in counts)
    for rank in range(len(counts)):
        mine = [position for piece in passes for position in piece.parts[rank]]
        assert mine == list(division.positions(rank))
        assert all(len(piece.microbatches[rank]) <= merge for piece in passes)
        assert all(sum(piece.microbatches[rank]) == len(piece.parts[rank]) for piece in passes)
    everyone = [position for piece in passes for position in piece.positions]
    assert sorted(everyone) == list(range(37))
    assert sum(sum(piece.sizes) for piece in passes) == 37


def test_shares_are_proportional_by_largest_remainder() -> None:
    assert proportional(10, (1.0, 1.0, 1.5)) == (3, 3, 4)
    assert proportional(16, (0.2, 0.1, 0.1)) == (8, 4, 4)
    for weights in ((1e-9, 1.0, 1.0), (5.0, 4.9, 0.1), (1.0, 1e9, 1.0)):
        counts = proportional(9, weights)
        assert sum(counts) == 9
        assert min(counts) >= 1


@pytest.mark.parametrize(
    ("batch", "num", "ranks", "shares", "word"),
    [
        (
            64,
            2,
            3,
            None,
            r"a batch of 64 is 2 microbatches, and 3 devices need 3: add --microbatches 3",
        ),
        (2, 2, 3, None, r"raise --batch to at least 3"),
        (64, 8, 3, (1, 1), r"--shares names 2 parts, but the plan divides the batch into 3"),
    ],
)
def test_what_cannot_be_divided(batch: int, num: int, ranks: int, shares: tuple | None, word: str) -> None:
    with pytest.raises(ConvoyError, match=word):
        divide(microbatch_sizes(batch, num), ranks, shares)
