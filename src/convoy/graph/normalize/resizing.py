"""Images made larger or smaller: interpolation and padding."""

from typing import Any

from convoy.graph.normalize.seen import Normal, Normalizer, Seen


def _interpolate(seen: Seen) -> Normal | None:
    found = seen.bound(
        input=None,
        size=None,
        scale_factor=None,
        mode="nearest",
        align_corners=None,
        recompute_scale_factor=None,
        antialias=False,
    )
    spatial = len(seen.output) - 2
    if found["antialias"] or spatial < 1:
        return None
    scale: Any = found["scale_factor"]
    if scale is not None:
        scale = None if found["recompute_scale_factor"] else _scales(scale, spatial)
    return Normal(
        "interpolate",
        {
            "input": seen.input,
            "output_size": seen.output[2:],
            "mode": found["mode"],
            "align_corners": found["align_corners"],
            "scale": scale,
        },
    )


def _scales(scale: Any, spatial: int) -> tuple[float, ...]:
    return tuple(map(float, scale)) if isinstance(scale, tuple | list) else (float(scale),) * spatial


def _pad(seen: Seen) -> Normal:
    found = seen.bound(input=None, pad=(), mode="constant", value=None)
    rank, given = len(seen.output), tuple(found["pad"])
    pairs = [(given[i], given[i + 1]) for i in range(0, len(given), 2)]
    pads = ((0, 0),) * (rank - len(pairs)) + tuple(reversed(pairs))
    value = 0.0 if found["value"] is None else found["value"]
    return Normal("pad", {"input": seen.input, "pads": pads, "mode": found["mode"], "value": value})


NORMALIZERS: dict[str, Normalizer] = {"interpolate": _interpolate, "pad": _pad}
