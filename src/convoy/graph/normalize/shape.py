"""Other shapes and other orders of the same numbers."""

from convoy.graph.normalize.seen import Normal, Normalizer, Seen, flat


def _reshape(seen: Seen) -> Normal | None:
    same_type = seen.values[seen.input].dtype == seen.outputs[0].dtype
    return Normal("reshape", {"input": seen.input}) if same_type else None


def _permuted(seen: Seen, order: list[int]) -> Normal:
    return Normal("permute", {"input": seen.input, "order": tuple(order)})


def _permute(seen: Seen) -> Normal:
    rank = len(seen.output)
    order = flat(seen.args[1:]) if len(seen.args) > 1 else tuple(seen.kwargs["dims"])
    return _permuted(seen, [dim % rank for dim in order])


def _transpose(seen: Seen) -> Normal:
    rank = len(seen.output)
    names = ("axis0", "axis1") if "axis0" in seen.kwargs or "axis1" in seen.kwargs else ("dim0", "dim1")
    found = seen.bound(input=None, **dict.fromkeys(names, 0))
    a, b = (found[name] % rank for name in names)
    order = list(range(rank))
    order[a], order[b] = b, a
    return _permuted(seen, order)


def _move(seen: Seen) -> Normal:
    rank = len(seen.output)
    found = seen.bound(input=None, source=0, destination=0)
    ends = [(value,) if isinstance(value, int) else tuple(value) for value in (found["source"], found["destination"])]
    sources, targets = ([dim % rank for dim in dims] for dims in ends)
    rest = iter(dim for dim in range(rank) if dim not in sources)
    placed = dict(zip(targets, sources, strict=True))
    return _permuted(seen, [placed[dim] if dim in placed else next(rest) for dim in range(rank)])


def _t(seen: Seen) -> Normal:
    return _permuted(seen, list(range(len(seen.output)))[::-1])


def _property(seen: Seen) -> Normal | None:
    """`.T` and `.mT`, told apart by their descriptors."""
    descriptor = getattr(seen.function, "__self__", None)
    name = getattr(descriptor, "__name__", "")
    rank = len(seen.output)
    if name == "T":
        return _t(seen)
    if name == "mT":
        return _permuted(seen, [*range(rank - 2), rank - 1, rank - 2])
    return None


NORMALIZERS: dict[str, Normalizer] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel"), _reshape),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    **dict.fromkeys(("movedim", "moveaxis"), _move),
    "get": _property,
    "permute": _permute,
    "t": _t,
}
