"""Pooling."""

from functools import partial
from typing import Any

from convoy.graph.normalize.seen import Normal, Normalizer, Seen, each


def _window(seen: Seen, found: dict[str, Any], spatial: int) -> dict[str, Any]:
    kernel = each(found["kernel_size"], spatial)
    stride = found["stride"]
    return {
        "input": found["input"],
        "kernel": kernel,
        "stride": kernel if stride is None or stride == () or stride == [] else each(stride, spatial),
        "padding": each(found["padding"], spatial),
        "ceil_mode": bool(found["ceil_mode"]),
    }


def _max_pool(seen: Seen, spatial: int) -> Normal | None:
    found = seen.bound(
        input=None, kernel_size=1, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False
    )
    if len(seen.outputs) > 1 or len(seen.shape(found["input"])) != spatial + 2:
        return None
    rest = {"dilation": each(found["dilation"], spatial), "count_include_pad": True, "divisor_override": None}
    return Normal("max_pool", {**_window(seen, found, spatial), **rest})


def _avg_pool(seen: Seen, spatial: int) -> Normal | None:
    found = seen.bound(
        input=None,
        kernel_size=1,
        stride=None,
        padding=0,
        ceil_mode=False,
        count_include_pad=True,
        divisor_override=None,
    )
    if len(seen.shape(found["input"])) != spatial + 2:
        return None
    rest = {name: found[name] for name in ("count_include_pad", "divisor_override")}
    return Normal("avg_pool", {**_window(seen, found, spatial), "dilation": (1,) * spatial, **rest})


def _adaptive(seen: Seen, spatial: int, op: str) -> Normal | None:
    if len(seen.outputs) > 1 or len(seen.shape(seen.input)) != spatial + 2:
        return None
    return Normal(op, {"input": seen.input, "output_size": seen.output[2:]})


NORMALIZERS: dict[str, Normalizer] = {
    **{f"max_pool{n}d": partial(_max_pool, spatial=n) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": partial(_avg_pool, spatial=n) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": partial(_adaptive, spatial=n, op="adaptive_avg_pool") for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": partial(_adaptive, spatial=n, op="adaptive_max_pool") for n in (1, 2, 3)},
}
