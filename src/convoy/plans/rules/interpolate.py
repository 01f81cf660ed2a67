"""Resizing of pictures: rows stay divided; each rank asks for the input rows that its output rows are made of."""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.graph.graph import Call, Graph
from convoy.plans.layout import Layout, Split, indices
from convoy.plans.rules.rule import Placed, Situation
from convoy.plans.rules.spatial import spatial
from convoy.plans.windows import output_split

ALONG = {
    "nearest": "nearest",
    "nearest-exact": "nearest-exact",
    "linear": "linear",
    "bilinear": "linear",
    "trilinear": "linear",
    "bicubic": "bicubic",
    "area": "area",
}


def rule(situation: Situation) -> Placed:
    """Samples and channels follow; rows that are divided stay divided."""
    call = situation.call
    source, output = call.attributes["input"], call.outputs[0]
    given = situation.given.get(source, Layout())
    shape, out_shape = situation.shape(source), situation.shape(output)
    dims = spatial(len(shape), len(call.attributes["output_size"]))
    kept: dict[int, Split] = {}
    left: dict[int, Split] = {}
    notes = []
    for dim, split in given.splits:
        if dim not in dims:
            kept[dim] = left[dim] = split
        elif call.attributes["mode"] not in ALONG:
            notes.append(f"dim {dim} is whole: no rule for {call.attributes['mode']} interpolation")
        elif out_shape[dim] < len(split.parts):
            notes.append(f"dim {dim} is whole: fewer output rows ({out_shape[dim]}) than ranks ({len(split.parts)})")
        elif repeats(call, shape[dim], out_shape[dim]) and all(isinstance(part, range) for part in split.parts):
            factor = out_shape[dim] // shape[dim]
            kept[dim] = split
            parts = (range(part[0] * factor, (part[-1] + 1) * factor) if part else range(0) for part in split.parts)
            left[dim] = Split(split.axes, tuple(parts))
        else:
            left[dim] = output_split(out_shape[dim], situation.mesh, split.axes)
            weights = weights_of(situation.graph, call, dim)
            asked = (_rows(weights, part) for part in left[dim].parts if isinstance(part, range))
            kept[dim] = Split(split.axes, tuple(asked))
    return Placed({source: Layout.of(kept)}, {output: Layout.of(left)}, "; ".join(notes))


def repeats(call: Call, size: int, output_size: int) -> bool:
    """Whether every row is repeated the same number of times."""
    return call.attributes["mode"] in ("nearest", "nearest-exact") and size > 0 and output_size % size == 0


def weights_of(graph: Graph, call: Call, dim: int) -> Tensor:
    """float64 [input rows, output rows]: how much each row of the input counts in each row of the output.

    All modes work on one dimension after the other; the weights are those by which torch resizes the unit matrix.
    """
    attributes = call.attributes
    shape, out_shape = graph.shape(attributes["input"]), graph.shape(call.outputs[0])
    scales = attributes["scale"]
    scale = None if scales is None else float(scales[dim - len(shape) + len(scales)])
    single = graph.values[attributes["input"]].dtype != torch.float64
    along = ALONG[attributes["mode"]]
    return _weights(along, attributes["align_corners"], shape[dim], out_shape[dim], scale, single)


@lru_cache(maxsize=256)
def _weights(
    mode: str, align_corners: bool | None, size: int, output_size: int, scale: float | None, single: bool
) -> Tensor:
    unit = torch.eye(size, dtype=torch.float32 if single and "nearest" in mode else torch.float64)[None]
    options: dict[str, Any] = {"mode": mode, "align_corners": align_corners}
    if mode != "bicubic":
        options |= {"size": output_size} if scale is None else {"scale_factor": scale}
        return F.interpolate(unit, **options)[0].double()
    options |= {"size": (output_size, 1)} if scale is None else {"scale_factor": (scale, 1.0)}
    return F.interpolate(unit[..., None], **options)[0, :, :, 0]


def _rows(weights: Tensor, part: range) -> range:
    """From the first to the last input row that counts in a part of the output."""
    used = weights[:, part.start : part.stop].ne(0).any(1).nonzero().flatten().tolist()
    rows = range(used[0], used[-1] + 1) if used else range(0)
    assert indices(rows) == rows
    return rows
