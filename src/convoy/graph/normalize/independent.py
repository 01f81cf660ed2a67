"""Functions without a rule of their own that can still be computed piece by piece along some dimensions."""

from convoy.graph.normalize.seen import Normal, Normalizer, Seen


def _opaque(dims: tuple[int, ...]) -> Normal | None:
    return Normal("opaque", {"independent": dims}) if dims else None


def _attention(seen: Seen) -> Normal | None:
    """Scaled dot product attention of each sample and each head by itself, [..., length, channels]; keys, values or a
    mask may be shared by several of them."""
    found = seen.bound(query=None, key=None, value=None, attn_mask=None)
    names = [found[name] for name in ("key", "value", "attn_mask") if isinstance(found[name], str)]
    own, given = seen.shape(found["query"]), [seen.shape(name) for name in names]
    if seen.kwargs.get("enable_gqa") or len(own) != max(map(len, given)) or seen.output[:-2] != own[:-2]:
        return None
    shared = tuple(name for name, shape in zip(names, given, strict=True) if shape[:-2] != own[:-2])
    dims = tuple(range(len(own) - 2))
    return Normal("opaque", {"independent": dims, "shared": shared}) if dims and shared else _opaque(dims)


def _along(name: str, place: int, last: bool = False) -> Normalizer:
    """A function that mixes numbers along the dimensions in its argument `name` only, and keeps all dimensions."""

    def normalizer(seen: Seen) -> Normal | None:
        rank = len(seen.shape(seen.input))
        dims = seen.kwargs.get(name, seen.args[place] if len(seen.args) > place else (-1 if last else None))
        dims = (dims,) if isinstance(dims, int) else dims
        ranks = {len(output.shape) for output in seen.outputs}
        if not isinstance(dims, tuple | list) or not all(isinstance(dim, int) for dim in dims) or ranks != {rank}:
            return None
        mixed = {dim % rank for dim in dims}
        return _opaque(tuple(dim for dim in range(rank) if dim not in mixed)) if len(seen.operands) == 1 else None

    return normalizer


def _samples(seen: Seen) -> Normal | None:
    return _opaque((0,)) if len(seen.shape(seen.input)) == 4 or seen.name == "fold" else None


def _unfold(seen: Seen) -> Normal | None:
    """`F.unfold` of images, or windows along one dimension."""
    if "kernel_size" in seen.kwargs or len(seen.outputs[0].shape) != len(seen.shape(seen.input)) + 1:
        return _samples(seen)
    mixed = seen.bound(input=None, dimension=0)["dimension"] % len(seen.shape(seen.input))
    return _opaque(tuple(dim for dim in range(len(seen.shape(seen.input))) if dim != mixed))


NORMALIZERS: dict[str, Normalizer] = {
    **dict.fromkeys(("var", "std", "amin", "cumsum", "logsumexp", "argmax", "argmin", "prod"), _along("dim", 1)),
    "flip": _along("dims", 1),
    "fold": _samples,
    "norm": _along("dim", 2),
    "normalize": _along("dim", 2),
    "repeat_interleave": _along("dim", 2),
    "roll": _along("dims", 2),
    "scaled_dot_product_attention": _attention,
    "sort": _along("dim", 1, last=True),
    "topk": _along("dim", 2, last=True),
    "unfold": _unfold,
}
