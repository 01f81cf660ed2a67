"""Ranges and single places of a tensor."""

from typing import Any

from convoy.graph.normalize.seen import Normal, Normalizer, Seen

Range = tuple[int, int, int] | int


def _select(seen: Seen, ranges: dict[int, Range]) -> Normal:
    sizes = seen.shape(seen.input)
    whole = tuple(ranges.get(dim, (0, size, 1)) for dim, size in enumerate(sizes))
    return Normal("select", {"input": seen.input, "ranges": whole})


def _getitem(seen: Seen) -> Normal | None:
    index = seen.args[1] if isinstance(seen.args[1], tuple) else (seen.args[1],)
    if not all(item is Ellipsis or _plain(item) for item in index):
        return None
    sizes = seen.shape(seen.input)
    if Ellipsis in index:
        place = index.index(Ellipsis)
        index = (*index[:place], *[slice(None)] * (len(sizes) - len(index) + 1), *index[place + 1 :])
    return _select(seen, {dim: _range(item, size) for dim, (item, size) in enumerate(zip(index, sizes, strict=False))})


def _plain(item: Any) -> bool:
    if isinstance(item, slice):
        return all(end is None or type(end) is int for end in (item.start, item.stop, item.step))
    return type(item) is int


def _range(item: int | slice, size: int) -> Range:
    if isinstance(item, int):
        return item % size
    start, stop, step = item.indices(size)
    return start, max(start, stop), step


def _narrow(seen: Seen) -> Normal | None:
    found = seen.bound(input=None, dim=0, start=0, length=0)
    dim = found["dim"] % len(seen.shape(seen.input))
    if not isinstance(found["start"], int):
        return None
    start = found["start"] % max(1, seen.shape(seen.input)[dim])
    return _select(seen, {dim: (start, start + found["length"], 1)})


def _one(seen: Seen) -> Normal | None:
    found = seen.bound(input=None, dim=0, index=0)
    sizes = seen.shape(seen.input)
    dim = found["dim"] % len(sizes)
    return _select(seen, {dim: found["index"] % sizes[dim]})


NORMALIZERS: dict[str, Normalizer] = {"getitem": _getitem, "narrow": _narrow, "select": _one}
