"""Pooling and resizing of pictures: rows and columns stay divided, with a halo where windows overlap."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from convoy.graph.graph import Call, Graph, Recognized, TorchCall, Value, each
from convoy.ops.kernel import Kernel, Part, Site, as_called, flat_padding, guarded
from convoy.ops.layouts import Follow, by_dim, even
from convoy.ops.operation import Kept, Operation, keeps_input
from convoy.plans.layout import Split
from convoy.plans.place import Placed, Situation
from convoy.plans.windows import Window, halo_split

_DEFAULTS: dict[str, dict[str, Any]] = {
    "max_pool": {"dilation": 1, "ceil_mode": False, "return_indices": False},
    "avg_pool": {"ceil_mode": False, "count_include_pad": True, "divisor_override": None},
}


def _recognize(call: TorchCall, spatial: int, op: str) -> Recognized | None:
    arguments = call.bound(input=None, kernel_size=1, stride=None, padding=0, **_DEFAULTS[op])
    if len(call.outputs) > 1 or len(call.shape(arguments["input"])) != spatial + 2:
        return None
    kernel, stride = each(arguments["kernel_size"], spatial), arguments["stride"]
    attributes = {
        "input": arguments["input"],
        "kernel": kernel,
        "stride": kernel if stride in (None, (), []) else each(stride, spatial),
        "padding": each(arguments["padding"], spatial),
        "ceil_mode": bool(arguments["ceil_mode"]),
        "dilation": each(arguments.get("dilation", 1), spatial),
        "count_include_pad": arguments.get("count_include_pad", True),
        "divisor_override": arguments.get("divisor_override"),
    }
    return Recognized(op, attributes)


def _recognize_adaptive(call: TorchCall, spatial: int, op: str) -> Recognized | None:
    if len(call.outputs) > 1 or len(call.shape(call.input)) != spatial + 2:
        return None
    return Recognized(op, {"input": call.input, "output_size": call.output[2:]})


def _pool(situation: Situation, linear: bool) -> Placed:
    """Place a pooling of [..., rows], [..., rows, columns] or [..., depth, rows, columns]: rows that are divided stay
    divided over the same axes. Adaptive windows of different sizes need their rows whole, but an average over all rows
    is a partial sum over the ranks that divide them."""
    call = situation.call
    windows, out_shape = _windows_of(situation.graph, call), situation.shape(call.outputs[0])
    is_uneven = (
        call.op == "avg_pool"
        and not call.attributes["divisor_override"]
        and any(
            count != window.kernel
            for window in windows.values()
            if window is not None
            for count in window.counts(range(window.output_size), call.attributes["count_include_pad"])
        )
    )

    def follow(dim: int, split: Split) -> Follow:
        if dim not in windows:
            return split, (dim, split)
        if call.op == "adaptive_avg_pool" and out_shape[dim] == 1:
            return split, None
        window = windows[dim]
        if window is None:
            return f"dim {dim} is whole: its windows differ in size"
        if window.output_size < len(split.parts):
            return f"dim {dim} is whole: fewer output rows ({window.output_size}) than ranks ({len(split.parts)})"
        if is_uneven:
            return f"dim {dim} is whole: the call's windows are means over unequal numbers"
        result = even(situation.mesh, split.axes, window.output_size)
        return halo_split(window, result), (dim, result)

    return by_dim(situation, follow, linear)


def _windows_of(graph: Graph, call: Call) -> dict[int, Window | None]:
    """The window that slides over each spatial dimension; None where adaptive windows differ in size."""
    attributes = call.attributes
    sizes, out_sizes = graph.shape(attributes["input"]), graph.shape(call.outputs[0])
    windows: dict[int, Window | None] = {}
    num_spatial = len(attributes["output_size" if "output_size" in attributes else "kernel"])
    for index, dim in enumerate(range(len(sizes) - num_spatial, len(sizes))):
        size, output = sizes[dim], out_sizes[dim]
        if "output_size" in attributes:
            # output row i covers the rows from ⌊i·size/output_size⌋ to ⌈(i+1)·size/output_size⌉
            differ = output == 0 or size % output
            windows[dim] = None if differ else Window(size, size // output, size // output)
            continue
        kernel, stride, dilation, padding = (
            attributes[name][index] for name in ("kernel", "stride", "dilation", "padding")
        )
        windows[dim] = Window(size, kernel, stride, dilation, padding, padding, attributes["ceil_mode"])
    return windows


def _build(site: Site) -> Kernel:
    """The largest value of every window, which ignores padding, or the mean, which counts it where the call does."""
    windows, attributes = _windows(site), site.call.attributes
    if not _divides_rows(site):
        return guarded(site, as_called(site))
    needs = [window.needed(site.rows(dim)) for dim, window in windows.items()]
    pad = flat_padding([(need.before, need.after) for need in needs])
    options = {"kernel_size": attributes["kernel"], "stride": attributes["stride"]}
    outside = 0.0
    if site.call.op == "max_pool":
        options["dilation"], outside = attributes["dilation"], -math.inf
    elif attributes["divisor_override"]:
        options["divisor_override"] = attributes["divisor_override"]
    pool = partial(getattr(F, f"{site.call.op}{len(windows)}d"), **options)
    return guarded(site, lambda x: [pool(F.pad(x, pad, value=outside) if any(pad) else x)])


def _build_adaptive(site: Site) -> Kernel:
    """On a rank's rows the windows are those of adaptive pooling again, to the rank's number of output rows. Where all
    rows are averaged, the rank's mean counts for the share of the rows that it has."""
    source, output = site.call.attributes["input"], site.output
    shape, num_dims = site.local_shape(output), len(site.call.attributes["output_size"])
    size = shape[-num_dims:]
    layout = site.layouts[source]
    if not any(dim >= len(shape) - num_dims for dim, _ in layout.splits):
        return guarded(site, as_called(site))
    function = getattr(F, f"{site.call.op}{num_dims}d")
    if site.call.op == "adaptive_max_pool":
        return guarded(site, lambda x: [function(x, size)])
    whole_shape = site.graph.shape(source)
    sum_dims = [dim for dim, _ in layout.splits if site.layouts[output].split(dim) is None]
    rows = [len(site.parts(source, dim)) for dim in sum_dims]
    share = math.prod(rows) / math.prod(whole_shape[dim] for dim in sum_dims)

    def pool(x: Tensor) -> list[Tensor]:
        if share == 0:
            return [x.new_zeros(shape) + x.sum()]
        y = function(x, size)
        return [y if share == 1 else y * share]

    return guarded(site, pool)


def _windows(part: Part) -> dict[int, Window]:
    return {dim: window for dim, window in _windows_of(part.graph, part.call).items() if window is not None}


def _divides_rows(part: Part) -> bool:
    return any(dim in _windows(part) for dim, _ in part.layouts[part.output].splits)


def _options(part: Part) -> dict[str, Any]:
    """The rank's own padding: the same at both ends, then the rest before and after."""
    if not _divides_rows(part):
        return {"padding": [(size, 0, 0) for size in part.call.attributes["padding"]]}
    needs = [window.needed(part.rows(dim)) for dim, window in _windows(part).items()]
    return {"padding": [(0, need.before, need.after) for need in needs]}


def _keeps_places(call: Call, values: Mapping[str, Value]) -> Kept:
    """The input, and the place of each maximum."""
    return ((call.attributes["input"], 0), (call.outputs[0], 8))


def _interpolate(call: TorchCall) -> Recognized | None:
    options = {"size": None, "scale_factor": None, "mode": "nearest", "align_corners": None}
    arguments = call.bound(input=None, **options, recompute_scale_factor=None, antialias=False)
    spatial = len(call.output) - 2
    if arguments["antialias"] or spatial < 1:
        return None
    scale: Any = None if arguments["recompute_scale_factor"] else arguments["scale_factor"]
    if scale is not None:
        scale = tuple(map(float, scale)) if isinstance(scale, tuple | list) else (float(scale),) * spatial
    names = ("input", "mode", "align_corners")
    attributes = {name: arguments[name] for name in names}
    return Recognized("interpolate", {**attributes, "output_size": call.output[2:], "scale": scale})


def _repeats(graph: Graph, call: Call) -> tuple[int, ...] | None:
    """How often each row of every spatial dimension is repeated; None where rows are made in another way."""
    attributes = call.attributes
    sizes = graph.shape(attributes["input"])[2:]
    if attributes["mode"] not in ("nearest", "nearest-exact"):
        return None
    if any(size == 0 or output % size for size, output in zip(sizes, attributes["output_size"], strict=True)):
        return None
    factors = tuple(output // size for size, output in zip(sizes, attributes["output_size"], strict=True))
    # torch finds a row's place by the factor that it was called with: 5 rows by 2.1 are 10, but not each of them twice
    return factors if attributes["scale"] in (None, factors) else None


def _place_resized(situation: Situation) -> Placed:
    """Samples and channels follow."""
    call = situation.call
    factors = _repeats(situation.graph, call)

    def follow(dim: int, split: Split) -> Follow:
        if dim < 2:
            return split, (dim, split)
        if factors is None or not all(isinstance(part, range) for part in split.parts):
            return f"dim {dim} is whole: {call.attributes['mode']} interpolation does not repeat its rows"
        factor = factors[dim - 2]
        parts = (range(part[0] * factor, (part[-1] + 1) * factor) if part else range(0) for part in split.parts)
        return split, (dim, Split(split.axes, tuple(parts)))

    return by_dim(situation, follow)


def _build_resized(site: Site) -> Kernel:
    shape = site.local_shape(site.call.outputs[0])
    if all(dim < 2 for dim, _ in site.layouts[site.call.outputs[0]].splits):
        return guarded(site, as_called(site))
    return guarded(site, lambda x: [F.interpolate(x, shape[2:], mode=site.call.attributes["mode"])])


def _pooling(op: str) -> Operation:
    is_max, is_adaptive = op.endswith("max_pool"), op.startswith("adaptive")
    recognize = partial(_recognize_adaptive if is_adaptive else _recognize, op=op)
    return Operation(
        op,
        partial(_pool, linear=not is_max),
        {f"{op}{n}d": partial(recognize, spatial=n) for n in (1, 2, 3)},
        _build_adaptive if is_adaptive else _build,
        keeps=_keeps_places if is_max else keeps_input,
        options=() if is_adaptive else ("kernel", "stride", "dilation", "ceil_mode"),
        local_options=None if is_adaptive else _options,
    )


OPERATIONS = (
    *map(_pooling, ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool")),
    Operation(
        "interpolate",
        _place_resized,
        {"interpolate": _interpolate},
        _build_resized,
        by_function=True,
        options=("mode", "align_corners"),
    ),
)
