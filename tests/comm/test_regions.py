"""Parts of a tensor by lists of indices, against plain indexing."""

import torch

from convoy.comm.redistribution import Region, extents

FEW, MANY, UNORDERED = (0, 1, 2, 9, 10, 30), tuple(range(0, 260, 2)), (7, 8, 3, 4, 20)
# A box, and the larger one in which it lies.
CASES = {
    "consecutive": ((range(2, 5), range(4)), (range(6), range(4))),
    "nothing": ((range(0), range(4)), (range(6), range(4))),
    "few runs, another dimension cut": ((FEW, range(1, 3)), (range(40), range(4))),
    "few runs of an unordered list": ((range(3), UNORDERED), (range(3), range(24))),
    "many runs": ((range(1, 3), MANY), (range(4), range(260))),
    "of a list": (((3, 9, 11, 40), range(3)), ((1, 3, 7, 9, 11, 13, 40), range(3))),
    "two lists, one of many runs": ((UNORDERED, MANY), (range(24), range(260))),
    "three lists": (((0, 2), (1, 3), (5, 0, 4)), (range(3), range(4), range(7))),
}


def test_a_region_is_plain_indexing() -> None:
    for case, (part, whole) in CASES.items():
        region, x, values = Region(part, whole), torch.randn(extents(whole)), torch.randn(extents(part))
        places = [
            torch.tensor([list(outer).index(i) for i in inner]).long() for inner, outer in zip(part, whole, strict=True)
        ]
        grid = tuple(place.view(-1, *(1,) * (len(places) - 1 - dim)) for dim, place in enumerate(places))
        written, added, want_written, want_added = (x.clone() for _ in range(4))
        region.write(written, values)
        region.write(added, values, accumulate=True)
        want_written[grid] = values
        want_added[grid] += values
        assert torch.equal(region.select(x), x[grid]) and torch.equal(region.take(x), x[grid]), case
        assert torch.equal(written, want_written) and torch.equal(added, want_added), case
