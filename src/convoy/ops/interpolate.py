"""Resizing of pictures: rows stay divided where each is repeated, as often as all others."""

from typing import Any

import torch.nn.functional as F

from convoy.graph.graph import Call, Graph, Recognized, TorchCall
from convoy.ops.kernel import Kernel, Site, as_called, guarded
from convoy.ops.layouts import Follow, by_dim, spatial
from convoy.ops.operation import Operation
from convoy.plans.layout import Split
from convoy.plans.place import Placed, Situation


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


def place(situation: Situation) -> Placed:
    """Samples and channels follow."""
    call = situation.call
    num_dims = len(situation.shape(call.attributes["input"]))
    dims = spatial(num_dims, len(call.attributes["output_size"]))
    factors = _repeats(situation.graph, call)

    def follow(dim: int, split: Split) -> Follow:
        if dim not in dims:
            return split, (dim, split)
        if factors is None or not all(isinstance(part, range) for part in split.parts):
            return f"dim {dim} is whole: {call.attributes['mode']} interpolation does not repeat its rows"
        factor = factors[dim - dims[0]]
        parts = (range(part[0] * factor, (part[-1] + 1) * factor) if part else range(0) for part in split.parts)
        return split, (dim, Split(split.axes, tuple(parts)))

    return by_dim(situation, follow)


def _build(site: Site) -> Kernel:
    shape = site.local_shape(site.call.outputs[0])
    if all(dim < 2 for dim, _ in site.layouts[site.call.outputs[0]].splits):
        return guarded(site, as_called(site))
    return guarded(site, lambda x: [F.interpolate(x, shape[2:], mode=site.call.attributes["mode"])])


OPERATIONS = (
    Operation(
        "interpolate", place, {"interpolate": _interpolate}, _build, by_function=True, options=("mode", "align_corners")
    ),
)
