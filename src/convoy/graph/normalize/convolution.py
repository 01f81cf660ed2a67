"""Convolutions and matrix products."""

from convoy.graph.normalize.seen import Normal, Normalizer, Seen, each


def _conv(seen: Seen) -> Normal | None:
    found = seen.bound(input=None, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1)
    spatial = len(seen.shape(found["weight"])) - 2
    if len(seen.shape(found["input"])) != spatial + 2:
        return None
    kernel, dilation = seen.shape(found["weight"])[2:], each(found["dilation"], spatial)
    if found["padding"] == "valid":
        padding = ((0, 0),) * spatial
    elif found["padding"] == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        padding = tuple((total // 2, total - total // 2) for total in totals)
    else:
        padding = tuple((p, p) for p in each(found["padding"], spatial))
    return Normal(
        "conv",
        {
            **found,
            "stride": each(found["stride"], spatial),
            "padding": padding,
            "dilation": dilation,
            "transposed": False,
            "output_padding": (0,) * spatial,
        },
    )


def _conv_transpose(seen: Seen) -> Normal | None:
    found = seen.bound(input=None, weight=None, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1)
    spatial = len(seen.shape(found["weight"])) - 2
    if len(seen.shape(found["input"])) != spatial + 2:
        return None
    return Normal(
        "conv",
        {
            **found,
            "stride": each(found["stride"], spatial),
            "padding": tuple((p, p) for p in each(found["padding"], spatial)),
            "dilation": each(found["dilation"], spatial),
            "transposed": True,
            "output_padding": each(found["output_padding"], spatial),
        },
    )


def _linear(seen: Seen) -> Normal | None:
    found = seen.bound(input=None, weight=None, bias=None)
    if len(seen.shape(found["weight"])) != 2 or len(seen.shape(found["input"])) < 2:
        return None
    return Normal("linear", found)


def _matmul(seen: Seen) -> Normal | None:
    if len(seen.operands) != 2:
        return None
    a, b = seen.operands
    return Normal("matmul", {"a": a, "b": b})


NORMALIZERS: dict[str, Normalizer] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _conv),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _conv_transpose),
    "linear": _linear,
    **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
}
