"""Parts of a tensor by lists of indices, against plain indexing."""

import pytest
import torch
from torch import Tensor

from convoy.comm.regions import Box, Region, extents

FEW = (0, 1, 2, 9, 10, 30)
MANY = tuple(range(0, 260, 2))
UNORDERED = (7, 8, 3, 4, 20)

# A box, and the larger one in which it lies.
CASES = {
    "consecutive": ((range(2, 5), range(4), range(1, 3)), (range(6), range(4), range(3))),
    "all": ((range(3, 6), range(4)), (range(3, 6), range(4))),
    "nothing": ((range(0), range(4)), (range(6), range(4))),
    "few runs": ((range(3), FEW, range(4)), (range(3), range(40), range(4))),
    "few runs, another dimension cut": ((FEW, range(1, 3)), (range(40), range(4))),
    "few runs of an unordered list": ((range(3), UNORDERED), (range(3), range(24))),
    "many runs": ((range(2), MANY, range(3)), (range(2), range(260), range(3))),
    "many runs, another dimension cut": ((range(1, 3), MANY), (range(4), range(260))),
    "of a list": (((3, 9, 11, 40), range(3)), ((1, 3, 7, 9, 11, 13, 40), range(3))),
    "two lists": ((FEW, range(1, 4), (0, 2, 5)), (range(40), range(5), range(6))),
    "two lists, one of many runs": ((UNORDERED, MANY), (range(24), range(260))),
    "three lists": (((0, 2), (1, 3), (5, 0, 4)), (range(3), range(4), range(7))),
}


def grid(part: Box, whole: Box) -> tuple[Tensor, ...]:
    """The places of a box for plain indexing."""
    places = [
        torch.tensor([list(outer).index(i) for i in inner]).long() for inner, outer in zip(part, whole, strict=True)
    ]
    return tuple(place.view(-1, *(1,) * (len(places) - 1 - dim)) for dim, place in enumerate(places))


def numbers(box: Box) -> Tensor:
    return torch.randn(extents(box), dtype=torch.float64)


def results(region: Region, x: Tensor, part: Tensor) -> dict[str, Tensor]:
    """What a region selects, and a tensor after it has been written and added to."""
    written, added = x.clone(), x.clone()
    region.write(written, part)
    region.write(added, part, accumulate=True)
    return {"select": region.select(x), "take": region.take(x), "write": written, "add": added}


def indexed(part: Box, whole: Box, x: Tensor, values: Tensor) -> dict[str, Tensor]:
    """The same by plain indexing."""
    places = grid(part, whole)
    written, added = x.clone(), x.clone()
    written[places] = values
    added[places] += values
    return {"select": x[places], "take": x[places], "write": written, "add": added}


def test_a_region_is_plain_indexing_and_another_one_is_not() -> None:
    for case, (part, whole) in CASES.items():
        region, x, values = Region(part, whole), numbers(whole), numbers(part)
        assert region.shape == extents(part)
        wanted = indexed(part, whole, x, values)
        for name, result in results(region, x, values).items():
            assert torch.equal(result, wanted[name]), (case, name)
        if case not in ("nothing", "all", "of a list"):  # of the next one along a dimension
            room = next(dim for dim, inner in enumerate(part) if max(inner) < max(whole[dim]))
            shifted = tuple(tuple(i + 1 for i in inner) if dim == room else inner for dim, inner in enumerate(part))
            for name, other in results(Region(shifted, whole), x, values).items():
                assert other.shape == wanted[name].shape and not torch.allclose(other, wanted[name]), (case, name)


def test_blocks_are_copied_where_runs_are_few_and_nothing_is_where_all_is_consecutive() -> None:
    def runs(case: str) -> int:
        return len(Region(*CASES[case])._runs)

    assert [runs(case) for case in ("few runs", "few runs of an unordered list", "of a list")] == [3, 3, 3]
    assert [runs(case) for case in ("many runs", "two lists", "consecutive")] == [0, 0, 0]
    part, whole = CASES["consecutive"]
    x, region = numbers(whole), Region(part, whole)
    assert region.select(x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert region.take(x).is_contiguous()
    assert Region(*CASES["all"]).full and Region(*CASES["nothing"]).empty
    with pytest.raises(AssertionError, match="is not a part of"):
        Region((range(2, 5),), (range(4),))
