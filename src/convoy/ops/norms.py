"""Group, instance, layer and RMS norm: whole on a rank, or over numbers of which several ranks hold parts; and local
response normalization, for which each channel needs its neighbors.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from convoy.comm.collectives import all_reduce
from convoy.graph.graph import Call, Graph, Recognized, TorchCall
from convoy.ops.kernel import Holders, Kernel, NotCompiled, Site, by_role
from convoy.ops.layouts import Follow, axes_along, by_channel, by_dim, groups_in, resolved
from convoy.ops.operation import Operation, Shape, keeps_input
from convoy.plans.layout import Layout, Split
from convoy.plans.place import Placed, Situation
from convoy.plans.windows import Window, halo_split


class Normalize(torch.autograd.Function):
    """(x − mean) / √(variance + eps), or x / √(mean(x²) + eps), of each row by itself.

    Ranks exchange mean and mean square deviation of what they have and combine them (Chan, Golub and LeVeque, 1979):
    nothing is computed as a small difference of large numbers. The backward pass adds up two numbers for each row.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, holders: Holders, eps: float, is_centred: bool) -> Tensor:
        """`x` [rows, numbers], this rank's part."""
        wide = x if x.dtype == torch.float64 else x.float()
        local_moments = wide.new_zeros(2, len(x))
        if x.numel():
            local_moments[0] = wide.mean(1) * is_centred
            local_moments[1] = (wide - local_moments[0, :, None]).square_().mean(1)
        mean, variance = holders.combined(local_moments)
        inverse = (variance + eps).rsqrt()[:, None]
        y = ((wide - mean[:, None]) * inverse).to(x.dtype)
        ctx.save_for_backward(y, inverse)
        ctx.holders, ctx.is_centred = holders, is_centred
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """dx = (dy − mean(dy) − y·mean(dy·y)) / √(variance + eps), where nothing is subtracted without mean(dy)."""
        y, inverse = ctx.saved_tensors
        wide = gradient.to(inverse.dtype)
        sums = all_reduce(torch.stack([wide.sum(1), (wide * y).sum(1)]), ctx.holders.group)
        mean, slope = (sums / ctx.holders.total)[..., None].unbind(0)
        dx = (wide - mean * ctx.is_centred - y * slope) * inverse
        return dx.to(y.dtype), None, None, None


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, view: tuple[int, ...]) -> Tensor:
    """Scale and shift by numbers that broadcast in the shape `view`; the type stays that of `y`."""
    dtype = y.dtype
    y = y if weight is None else y * weight.view(view)
    y = y if bias is None else y + bias.view(view)
    return y.to(dtype)


def _instance_norm(call: TorchCall) -> Recognized | None:
    buffers = {"running_mean": None, "running_var": None}
    arguments = call.bound(input=None, **buffers, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5)
    names = {name: arguments[name] for name in ("input", "weight", "bias", "eps")}
    statistics = {name: arguments[name] for name in buffers}
    if not arguments["use_input_stats"]:
        fixed = {"training": False, "momentum": arguments["momentum"], "num_batches_tracked": None}
        return Recognized("batch_norm", {**names, **statistics, **fixed})
    if arguments["running_mean"] is not None:
        return Recognized("opaque", updates=True)
    if len(call.shape(arguments["input"])) < 3:
        return None
    return Recognized("group_norm", {**names, "num_groups": call.shape(arguments["input"])[1]})


def _group_norm(call: TorchCall) -> Recognized:
    return Recognized("group_norm", call.bound(input=None, num_groups=1, weight=None, bias=None, eps=1e-5))


def _place_groups(situation: Situation) -> Placed:
    """Channels whose groups are cut are brought together; of divided rows and columns the call adds up the statistics,
    two numbers for each sample and group."""
    call = situation.call
    layout = resolved(situation, call.attributes["input"])
    size, channels = situation.shape(call.attributes["input"])[1] // call.attributes["num_groups"], layout.split(1)
    if channels is None or all(groups_in(part, size) is not None for part in channels.parts):
        return by_channel(situation, layout)
    without_channels = Layout.of({dim: split for dim, split in layout.splits if dim != 1})
    return replace(by_channel(situation, without_channels), note="groups of divided channels are whole")


def _shared_dims(call: Call, graph: Graph, layout: Layout) -> set[int]:
    """Rows and columns behind the channels, or the dimensions of the vectors that are normalized."""
    rank = len(graph.shape(call.attributes["input"]))
    return set(range(2 if call.op == "group_norm" else rank - len(call.attributes["normalized_shape"]), rank))


def _build(site: Site) -> Kernel:
    """The function itself where the rank has whole groups or vectors; otherwise the call adds up the statistics."""
    call, pick = site.call, by_role(site.call, "input", "weight", "bias")
    source, eps, is_group = call.attributes["input"], call.attributes["eps"], call.op == "group_norm"
    shape, layout = site.graph.shape(source), site.layouts[source]
    dims = sorted(_shared_dims(call, site.graph, layout))
    local = tuple(len(site.parts(source, dim)) for dim in dims)
    channels = len(site.parts(source, 1)) if is_group else 1
    size = shape[1] // call.attributes["num_groups"] if is_group else 1  # channels of a group
    view = (-1, *[1] * len(dims)) if is_group else local
    holders = Holders.of(site, axes_along(layout, dims), dims, size)

    def alone(*tensors: Tensor) -> list[Tensor]:
        x, weight, bias = pick(tensors)
        if call.op == "layer_norm":
            return [F.layer_norm(x, local, weight, bias, eps)]
        if call.op == "rms_norm":
            return [F.rms_norm(x, local, weight, eps)]
        if x.numel() == 0:
            return [affine(x.clone(), weight, bias, view)]
        return [F.group_norm(x, channels // size, weight, bias, eps)]

    if holders is None:
        return alone
    is_centred = call.op != "rms_norm"

    def together(*tensors: Tensor) -> list[Tensor]:
        x, weight, bias = pick(tensors)
        rows = x.reshape(math.prod(x.shape[: dims[0]]) // size, size * math.prod(local))
        y = Normalize.apply(rows, holders, torch.finfo(x.dtype).eps if eps is None else eps, is_centred)
        y = y.view(x.shape)
        return [affine(y if y.stride() == x.stride() else torch.empty_like(x).copy_(y), weight, bias, view)]

    return NotCompiled(together)


def _vectors(call: TorchCall, op: str, **rest: Any) -> Recognized:
    arguments = call.bound(input=None, normalized_shape=None, weight=None, **rest)
    return Recognized(op, {**arguments, "normalized_shape": tuple(arguments["normalized_shape"])})


def _place_vectors(situation: Situation) -> Placed:
    """Scale and shift are divided as the normalized dimensions are. Where one of these is divided, the call adds up the
    statistics over its axes, two numbers for each vector that is normalized."""
    call = situation.call
    source = call.attributes["input"]
    layout = resolved(situation, source)
    first = len(situation.shape(source)) - len(call.attributes["normalized_shape"])
    splits = {dim - first: split for dim, split in layout.splits if dim >= first}
    other_axes = {axis for dim, split in layout.splits if dim < first for axis in split.axes}
    inputs = {name: Layout.of(splits, copied=other_axes) for name in call.inputs}
    inputs[source] = layout
    return Placed(inputs, {call.outputs[0]: layout})


def _numbers_of_vectors(call: Call, shape: Shape) -> int:
    """Two for each vector that is normalized by itself."""
    return 2 * math.prod(shape[: len(shape) - len(call.attributes["normalized_shape"])])


def _lrn(call: TorchCall) -> Recognized:
    return Recognized("lrn", call.bound(input=None, size=1, alpha=1e-4, beta=0.75, k=1.0))


def _place_lrn(situation: Situation) -> Placed:
    """Where ranks hold consecutive channels, each asks for a few more on both sides; otherwise for all channels."""
    size, total = situation.call.attributes["size"], situation.shape(situation.call.attributes["input"])[1]
    window = Window(total, size, before=size // 2, after=(size - 1) // 2)

    def follow(dim: int, split: Split) -> Follow:
        if dim != 1:
            return split, (dim, split)
        if not all(isinstance(part, range) for part in split.parts):
            return ""
        return halo_split(window, split), (dim, split)

    return by_dim(situation, follow)


def _build_lrn(site: Site) -> Kernel:
    """Normalizes the channels of the rank's input, neighbours included, and gives its own."""
    call = site.call
    source = call.attributes["input"]
    size, alpha, beta, k = (call.attributes[name] for name in ("size", "alpha", "beta", "k"))
    input_channels, output_channels = site.parts(source, 1), site.parts(call.outputs[0], 1)
    start = output_channels[0] - input_channels[0] if output_channels else 0
    is_cut = len(output_channels) < len(input_channels)

    def kernel(x: Tensor) -> list[Tensor]:
        y = F.local_response_norm(x, size, alpha, beta, k) if x.numel() else x.clone()
        return [y.narrow(1, start, len(output_channels)) if is_cut else y]

    return kernel


_ALIKE: dict[str, Any] = {"keeps": keeps_input, "follows": True, "passes": 1.0, "shared_dims": _shared_dims}
_ALIKE |= {"whole_precision": frozenset({"cuda"})}
_OF_VECTORS: dict[str, Any] = {"options": ("normalized_shape",), **_ALIKE}

OPERATIONS = (
    Operation(
        "group_norm",
        _place_groups,
        {"group_norm": _group_norm, "instance_norm": _instance_norm},
        _build,
        options=("num_groups",),
        statistics=lambda call, shape: 2 * shape[0] * call.attributes["num_groups"],
        **_ALIKE,
    ),
    Operation(
        "layer_norm",
        _place_vectors,
        {"layer_norm": partial(_vectors, op="layer_norm", bias=None, eps=1e-5)},
        _build,
        statistics=_numbers_of_vectors,
        **_OF_VECTORS,
    ),
    Operation(
        "rms_norm",
        _place_vectors,
        {"rms_norm": partial(_vectors, op="rms_norm", eps=None)},
        _build,
        keeps_inside=1,
        statistics=_numbers_of_vectors,
        **_OF_VECTORS,
    ),
    Operation(
        "lrn",
        _place_lrn,
        {"local_response_norm": _lrn},
        _build_lrn,
        keeps=keeps_input,
        keeps_inside=3,
        follows=True,
        passes=4.0,
        options=("size",),
        whole_precision=frozenset({"cpu", "cuda"}),
    ),
)
