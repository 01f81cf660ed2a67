"""Group, instance, layer and RMS norm: whole on a rank, or over numbers of which several ranks hold parts."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from convoy.comm.collectives import all_gather, all_reduce
from convoy.graph.graph import Call, Graph, Recognized, TorchCall
from convoy.ops.constants import Constants
from convoy.ops.context import exchanged
from convoy.ops.kernel import Alone, Kernel, Site, by_role
from convoy.ops.layouts import axes_along, by_channel, groups_in, resolved
from convoy.ops.operation import Operation, Shape, keeps_input
from convoy.plans.layout import Layout
from convoy.plans.mesh import Axes
from convoy.plans.place import Placed, Situation


@dataclass(frozen=True)
class Sharing:
    """How groups of channels lie over ranks."""

    group: ProcessGroup  # the ranks that have parts of the same samples
    membership: tuple[int, ...]  # the group of each of this rank's channels
    shares: tuple[tuple[float, ...], ...]  # by rank and group: the rank's share of the group's elements
    total: int  # elements of a group on all ranks

    def add_up(self, x: Tensor) -> Tensor:
        """Add up the channels of each group: [..., channels] to [..., groups]."""
        groups = len(self.shares[0])
        if groups == 1:
            return x.sum(-1, keepdim=True)
        return x.new_zeros(*x.shape[:-1], groups).index_add_(-1, self._index.like(x, torch.int64), x)

    def spread(self, x: Tensor) -> Tensor:
        """Give each channel the number of its group: [..., groups] to [..., channels, 1]."""
        if len(self.shares[0]) > 1:
            x = x.index_select(-1, self._index.like(x, torch.int64))
        return x[..., None]

    @cached_property
    def rank_shares(self) -> Constants:
        return Constants(self.shares)

    @cached_property
    def _index(self) -> Constants:
        return Constants(self.membership)


class Normalize(torch.autograd.Function):
    """(x − mean) / √(variance + eps), or x / √(mean(x²) + eps), over groups of channels that several ranks hold parts
    of.

    Ranks exchange mean and mean square deviation of what they have and combine them (Chan, Golub and LeVeque, 1979):
    nothing is computed as a small difference of large numbers. The backward pass adds up two numbers for each group.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharing: Sharing, eps: float, is_centred: bool) -> Tensor:
        """`x` [samples, channels, elements], this rank's part."""
        wide = x if x.dtype == torch.float64 else x.float()
        gathered = exchanged(all_gather, _statistics(wide, sharing, is_centred), sharing.group)
        means, squares = gathered.unbind(1)
        shares = sharing.rank_shares.like(wide)[:, None]
        mean = (means * shares).sum(0)
        variance = ((squares + (means - mean).square()) * shares).sum(0)
        inverse = (variance + eps).rsqrt()
        y = ((wide - sharing.spread(mean)) * sharing.spread(inverse)).to(x.dtype)
        ctx.save_for_backward(y, inverse)
        ctx.sharing, ctx.is_centred = sharing, is_centred
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """dx = (dy − mean(dy) − y·mean(dy·y)) / √(variance + eps), where nothing is subtracted without mean(dy)."""
        y, inverse = ctx.saved_tensors
        sharing: Sharing = ctx.sharing
        wide = gradient.to(inverse.dtype)
        sums = sharing.add_up(torch.stack([wide.sum(2), (wide * y).sum(2)]))
        mean, slope = (all_reduce(sums, sharing.group) / sharing.total).unbind(0)
        centred = wide - sharing.spread(mean) if ctx.is_centred else wide
        dx = (centred - y * sharing.spread(slope)) * sharing.spread(inverse)
        return dx.to(y.dtype), None, None, None


def _statistics(x: Tensor, sharing: Sharing, is_centred: bool) -> Tensor:
    """Mean, or 0, and mean square deviation of this rank's part of each group: [2, samples, groups]."""
    samples, channels, elements = x.shape
    if channels == 0 or elements == 0:
        return x.new_zeros(2, samples, len(sharing.shares[0]))
    counts = sharing.add_up(x.new_ones(channels)).clamp_(min=1)
    mean = sharing.add_up(x.mean(2)) / counts * is_centred
    squares = sharing.add_up((x - sharing.spread(mean)).square_().mean(2)) / counts
    return torch.stack([mean, squares])


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


def _build(site: Site) -> Kernel:
    """The function itself where the rank has whole groups, or vectors, which are as one group. Where some are divided,
    the call adds up the statistics, two numbers for each sample and group: never dearer than bringing the channels
    together."""
    call, pick = site.call, by_role(site.call, "input", "weight", "bias")
    source, eps, is_group = call.attributes["input"], call.attributes["eps"], call.op == "group_norm"
    shape, layout = site.graph.shape(source), site.layouts[source]
    axes = axes_along(layout, (_dims_of_groups if is_group else _dims_of_vectors)(call, site.graph, layout))
    group = site.groups.of(axes)
    first = 1 if is_group else len(shape) - len(call.attributes["normalized_shape"])
    local = tuple(len(site.parts(source, dim)) for dim in range(first, len(shape)))
    size = shape[1] // call.attributes["num_groups"] if is_group else shape[first]  # channels of a group
    view = (-1, *[1] * (len(shape) - 2)) if is_group else local

    def alone(*tensors: Tensor) -> list[Tensor]:
        x, weight, bias = pick(tensors)
        if call.op == "layer_norm":
            return [F.layer_norm(x, local, weight, bias, eps)]
        if call.op == "rms_norm":
            return [F.rms_norm(x, local, weight, eps)]
        if x.numel() == 0:
            return [affine(x.clone(), weight, bias, view)]
        return [F.group_norm(x, local[0] // size, weight, bias, eps)]

    if group is None:
        return alone
    sharing = _sharing(site, group, axes, first, size)
    is_centred = call.op != "rms_norm"

    def together(*tensors: Tensor) -> list[Tensor]:
        x, weight, bias = pick(tensors)
        y = Normalize.apply(_rows(x, first), sharing, torch.finfo(x.dtype).eps if eps is None else eps, is_centred)
        return [affine(_from_rows(y, x, first), weight, bias, view)]

    return Alone(together)


def _sharing(site: Site, group: ProcessGroup, axes: Axes, first: int, size: int) -> Sharing:
    """How ranks share groups of `size` channels, at dimension `first`, with all elements behind them."""
    source = site.call.attributes["input"]
    shape, layout = site.graph.shape(source), site.layouts[source]
    parts = [
        [layout.parts(dim, site.mesh, place, shape[dim]) for dim in range(first, len(shape))]
        for place in site.mesh.group(site.coordinates, axes)
    ]
    numbers = sorted({channel // size for channels, *_ in parts for channel in channels})
    total = size * math.prod(shape[first + 1 :])
    shares = []
    for channels, *rest in parts:
        counts = Counter(channel // size for channel in channels)
        elements = math.prod(map(len, rest))
        shares.append(tuple(counts[number] * elements / total for number in numbers))
    membership = tuple(numbers.index(channel // size) for channel in site.parts(source, first))
    return Sharing(group, membership, tuple(shares), total)


def _rows(x: Tensor, first: int) -> Tensor:
    """`x` as [samples, channels, elements], with its channels at dimension `first`; images without a copy."""
    if first == 1 and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1).flatten(1, 2).transpose(1, 2)
    return x.reshape(math.prod(x.shape[:first]), x.shape[first], math.prod(x.shape[first + 1 :]))


def _from_rows(y: Tensor, x: Tensor, first: int) -> Tensor:
    """The result in the shape and memory format of `x`."""
    if first == 1 and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        y = y.transpose(1, 2).unflatten(1, x.shape[2:])
        return y.permute(0, 3, 1, 2)
    return y.reshape(x.shape)


def _dims_of_groups(call: Call, graph: Graph, layout: Layout) -> set[int]:
    """Rows and columns, and the channels where those of a group lie on several ranks."""
    shape, split = graph.shape(call.attributes["input"]), layout.split(1)
    size = shape[1] // call.attributes["num_groups"]
    is_cut = split is not None and None in [groups_in(part, size) for part in split.parts]
    return {*range(2, len(shape)), *([1] if is_cut else [])}


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


def _dims_of_vectors(call: Call, graph: Graph, layout: Layout) -> set[int]:
    """The dimensions that are normalized."""
    rank = len(graph.shape(call.attributes["input"]))
    return set(range(rank - len(call.attributes["normalized_shape"]), rank))


_ALIKE: dict[str, Any] = {"keeps": keeps_input, "follows": True, "passes": 1.0, "whole_precision": frozenset({"cuda"})}
_OF_VECTORS: dict[str, Any] = {"options": ("normalized_shape",), "shared_dims": _dims_of_vectors, **_ALIKE}

OPERATIONS = (
    Operation(
        "group_norm",
        by_channel,
        {"group_norm": _group_norm, "instance_norm": _instance_norm},
        _build,
        options=("num_groups",),
        shared_dims=_dims_of_groups,
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
)
