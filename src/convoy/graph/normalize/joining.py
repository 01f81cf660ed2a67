"""Joining tensors along a dimension and dividing them again."""

from convoy.graph.graph import Ref
from convoy.graph.normalize.seen import Normal, Normalizer, Seen


def _cat(seen: Seen) -> Normal | None:
    found = seen.bound(tensors=(), dim=0)
    dim = seen.kwargs.get("axis", found["dim"]) % len(seen.output)
    operands = tuple(ref.name for ref in found["tensors"] if isinstance(ref, Ref))
    if any(len(seen.shape(name)) != len(seen.output) for name in operands):
        return None  # torch lets empty one-dimensional tensors pass
    return Normal("cat", {"operands": operands, "dim": dim})


def _split(seen: Seen) -> Normal:
    whole = seen.shape(seen.input)
    found = seen.bound(input=None, pieces=None, dim=0)
    dim = found["dim"] % len(whole)
    return Normal("split", {"input": seen.input, "dim": dim, "sizes": tuple(out.shape[dim] for out in seen.outputs)})


NORMALIZERS: dict[str, Normalizer] = {
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(("chunk", "split", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split"), _split),
}
