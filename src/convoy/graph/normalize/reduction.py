"""Sums, means and maxima over dimensions; softmax."""

from convoy.graph.normalize.seen import Normal, Normalizer, Seen


def _reduce(seen: Seen) -> Normal | None:
    found = seen.bound(input=None, dim=None, keepdim=False, dtype=None)
    dims = seen.kwargs.get("axis", found["dim"])
    rank = len(seen.shape(seen.input))
    if found["dtype"] is not None or rank == 0 or "keepdims" in seen.kwargs:
        return None
    if seen.values[seen.input].dtype != seen.outputs[0].dtype:
        return None
    if dims is None or dims in ((), []):
        dims = tuple(range(rank))
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    return Normal(
        "reduce",
        {
            "input": seen.input,
            "function": seen.name,
            "dims": tuple(sorted(dim % rank for dim in dims)),
            "keepdim": bool(found["keepdim"]),
        },
    )


def _softmax(seen: Seen) -> Normal | None:
    dim = seen.kwargs.get("dim", seen.args[1] if len(seen.args) > 1 else None)
    if dim is None or seen.values[seen.input].dtype != seen.outputs[0].dtype:
        return None
    return Normal("softmax", {"input": seen.input, "dim": dim % len(seen.output), "function": seen.name})


NORMALIZERS: dict[str, Normalizer] = {
    **dict.fromkeys(("mean", "sum", "amax"), _reduce),
    **dict.fromkeys(("softmax", "log_softmax"), _softmax),
}
