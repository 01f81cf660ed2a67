"""Resizing of pictures: rows stay divided; each rank asks for the input rows that its output rows are made of."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.graph.graph import Call, Graph, Recognized, TorchCall
from convoy.ops.constants import Constants
from convoy.ops.kernel import Kernel, Site, as_called, guarded, picking
from convoy.ops.layouts import Follow, by_dim, spatial
from convoy.ops.operation import Operation
from convoy.plans.layout import Split, indices
from convoy.plans.place import Placed, Situation
from convoy.plans.windows import output_split


def _interpolate(call: TorchCall) -> Recognized | None:
    arguments = call.bound(
        input=None,
        size=None,
        scale_factor=None,
        mode="nearest",
        align_corners=None,
        recompute_scale_factor=None,
        antialias=False,
    )
    spatial = len(call.output) - 2
    if arguments["antialias"] or spatial < 1:
        return None
    scale: Any = None if arguments["recompute_scale_factor"] else arguments["scale_factor"]
    if scale is not None:
        scale = tuple(map(float, scale)) if isinstance(scale, tuple | list) else (float(scale),) * spatial
    return Recognized(
        "interpolate",
        {
            "input": call.input,
            "output_size": call.output[2:],
            "mode": arguments["mode"],
            "align_corners": arguments["align_corners"],
            "scale": scale,
        },
    )


# for each mode the one that does the same along one dimension
ALONG = {mode: mode for mode in ("nearest", "nearest-exact", "linear", "bicubic", "area")}
ALONG |= {"bilinear": "linear", "trilinear": "linear"}


def place(situation: Situation) -> Placed:
    """Samples and channels follow; rows that are divided stay divided."""
    graph, call = situation.graph, situation.call
    shape, out_shape = situation.shape(call.attributes["input"]), situation.shape(call.outputs[0])
    dims = spatial(len(shape), len(call.attributes["output_size"]))

    is_odd = any(_is_odd(graph, call, dim) for dim in dims)

    def follow(dim: int, split: Split) -> Follow:
        if dim not in dims:
            return split, (dim, split)
        if is_odd:
            return f"dim {dim} is whole: the factor of the call is not that of the sizes"
        if call.attributes["mode"] not in ALONG:
            return f"dim {dim} is whole: no rule for {call.attributes['mode']} interpolation"
        if out_shape[dim] < len(split.parts):
            return f"dim {dim} is whole: fewer output rows ({out_shape[dim]}) than ranks ({len(split.parts)})"
        if repeats(graph, call, dim) and all(isinstance(part, range) for part in split.parts):
            factor = out_shape[dim] // shape[dim]
            parts = (range(part[0] * factor, (part[-1] + 1) * factor) if part else range(0) for part in split.parts)
            return split, (dim, Split(split.axes, tuple(parts)))
        result = output_split(out_shape[dim], situation.mesh, split.axes)
        weights = weights_of(graph, call, dim)
        rows = (_rows(weights, part) for part in result.parts if isinstance(part, range))
        return Split(split.axes, tuple(rows)), (dim, result)

    return by_dim(situation, follow)


def repeats(graph: Graph, call: Call, dim: int) -> bool:
    """Whether every row is repeated the same number of times."""
    attributes = call.attributes
    size, output_size = graph.shape(attributes["input"])[dim], graph.shape(call.outputs[0])[dim]
    # torch finds a row's place by the factor that it was called with: 5 rows by 2.1 are 10, but not each of them twice
    exact = _scale(graph, call, dim) in (None, output_size / size if size else None)
    return attributes["mode"] in ("nearest", "nearest-exact") and size > 0 and output_size % size == 0 and exact


def _scale(graph: Graph, call: Call, dim: int) -> float | None:
    """The factor that torch goes by; None where that is the ratio of the sizes."""
    scales = call.attributes["scale"]
    return None if scales is None else float(scales[dim - len(graph.shape(call.outputs[0])) + len(scales)])


def _is_odd(graph: Graph, call: Call, dim: int) -> bool:
    """Whether torch may take either factor, by its kernels: that of the call or, of as many or twice as many rows, that
    of the sizes (`nearest_idx` in its UpSample.h)."""
    attributes = call.attributes
    size, output_size = graph.shape(attributes["input"])[dim], graph.shape(call.outputs[0])[dim]
    if attributes["mode"] != "nearest" or output_size not in (size, 2 * size):
        return False
    return _scale(graph, call, dim) not in (None, output_size / size if size else None)


def weights_of(graph: Graph, call: Call, dim: int) -> Tensor:
    """float64 [input rows, output rows]: how much each row of the input counts in each row of the output. All modes
    work on one dimension after the other; the weights are those by which torch resizes the unit matrix."""
    attributes = call.attributes
    shape, out_shape = graph.shape(attributes["input"]), graph.shape(call.outputs[0])
    scale = _scale(graph, call, dim)
    is_single = graph.values[attributes["input"]].dtype != torch.float64
    along = ALONG[attributes["mode"]]
    return _weights(along, attributes["align_corners"], shape[dim], out_shape[dim], scale, is_single)


@lru_cache(maxsize=256)
def _weights(
    mode: str, align_corners: bool | None, size: int, output_size: int, scale: float | None, is_single: bool
) -> Tensor:
    unit = torch.eye(size, dtype=torch.float32 if is_single and "nearest" in mode else torch.float64)[None]
    options: dict[str, Any] = {"mode": mode, "align_corners": align_corners}
    if mode != "bicubic":
        options |= {"size": output_size} if scale is None else {"scale_factor": scale}
        return F.interpolate(unit, **options)[0].double()
    options |= {"size": (output_size, 1)} if scale is None else {"scale_factor": (scale, 1.0)}
    return F.interpolate(unit[..., None], **options)[0, :, :, 0]


def _rows(weights: Tensor, part: range) -> range:
    """From the first to the last input row that counts in a part of the output."""
    used_rows = weights[:, part.start : part.stop].ne(0).any(1).nonzero().flatten().tolist()
    rows = range(used_rows[0], used_rows[-1] + 1) if used_rows else range(0)
    assert indices(rows) == rows
    return rows


def _build(site: Site) -> Kernel:
    """Divided dimensions by their matrix of weights, one after another; the others by torch's function."""
    call = site.call
    output = call.outputs[0]
    shape = site.local_shape(output)
    dims = spatial(len(shape), len(call.attributes["output_size"]))
    divided_dims = [dim for dim in dims if site.layouts[output].split(dim) is not None]
    if not divided_dims or 0 in shape:
        return guarded(site, as_called(site))
    if all(_repeats(site, dim) for dim in dims):
        size = tuple(shape[dim] for dim in dims)
        return lambda x: [F.interpolate(x, size, mode=call.attributes["mode"])]
    resizers = [_along(site, dim) for dim in divided_dims]
    options = None if len(divided_dims) == len(dims) else _options(site, dims, divided_dims)

    def kernel(x: Tensor) -> list[Tensor]:
        for resize in resizers:
            x = resize(x)
        return [x if options is None else F.interpolate(x, **options)]

    return kernel


def _repeats(site: Site, dim: int) -> bool:
    """Whether the rank's output is each of its own rows, repeated."""
    source, output = site.call.attributes["input"], site.call.outputs[0]
    size, output_size = site.graph.shape(source)[dim], site.graph.shape(output)[dim]
    if not repeats(site.graph, site.call, dim):
        return False
    factor = output_size // size
    rows = [row * factor + copy for row in site.parts(source, dim) for copy in range(factor)]
    return rows == list(site.parts(output, dim))


def _along(site: Site, dim: int) -> Callable[[Tensor], Tensor]:
    """Resize the rank's rows of one dimension."""
    rows, output = site.parts(site.call.attributes["input"], dim), site.parts(site.call.outputs[0], dim)
    weights = weights_of(site.graph, site.call, dim)[torch.tensor(rows)][:, torch.tensor(output)]
    if "nearest" in site.call.attributes["mode"]:
        return picking(dim, weights.argmax(0))

    constants = Constants(weights)

    def resize(x: Tensor) -> Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            y = x.movedim(dim, -1).to(dtype) @ constants.like(x, dtype)
        return y.movedim(-1, dim).to(x.dtype)

    return resize


def _options(site: Site, dims: range, divided_dims: list[int]) -> dict[str, Any]:
    """Options for the dimensions that are whole; the others already have their size, which torch then leaves as it
    is."""
    attributes = site.call.attributes
    options: dict[str, Any] = {"mode": attributes["mode"], "align_corners": attributes["align_corners"]}
    scales = attributes["scale"]
    if scales is None:
        options["size"] = tuple(site.local_shape(site.call.outputs[0])[dim] for dim in dims)
    else:
        options["scale_factor"] = tuple(
            1.0 if dim in divided_dims else float(scale) for dim, scale in zip(dims, scales, strict=True)
        )
    return options


OPERATIONS = (
    Operation(
        "interpolate", place, {"interpolate": _interpolate}, _build, by_function=True, options=("mode", "align_corners")
    ),
)
