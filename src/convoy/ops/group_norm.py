"""Group norm and instance norm."""

import math
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.graph.graph import Call, Graph
from convoy.graph.torch_call import Recognized, TorchCall
from convoy.ops.kernel import Alone, Kernel, Site, by_role
from convoy.ops.layouts import axes_along, by_channel
from convoy.ops.operation import Operation, keeps_input
from convoy.ops.shared_statistics import Normalize, Sharing, affine
from convoy.plans.layout import Indices, Layout
from convoy.plans.mesh import Axes


def _instance_norm(call: TorchCall) -> Recognized | None:
    arguments = call.bound(
        input=None,
        running_mean=None,
        running_var=None,
        weight=None,
        bias=None,
        use_input_stats=True,
        momentum=0.1,
        eps=1e-5,
    )
    names = {name: arguments[name] for name in ("input", "weight", "bias", "eps")}
    statistics = {name: arguments[name] for name in ("running_mean", "running_var")}
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
    """The function itself where the rank has whole groups. Where rows, columns or the channels of a group are divided,
    the call adds up the statistics, two numbers for each sample and group: never dearer than bringing the channels
    together."""
    call, pick = site.call, by_role(site.call, "input", "weight", "bias")
    source, eps = call.attributes["input"], call.attributes["eps"]
    shape = site.graph.shape(source)
    size, view = shape[1] // call.attributes["num_groups"], (-1, *[1] * (len(shape) - 2))
    num_groups = len(site.parts(source, 1)) // size
    axes = axes_along(site.layouts[source], _shared_dims(call, site.graph, site.layouts[source]))
    group = site.groups.of(axes)

    def alone(*tensors: Tensor) -> list[Tensor]:
        x, weight, bias = pick(tensors)
        if x.numel() == 0:
            return [affine(x.clone(), weight, bias, view)]
        return [F.group_norm(x, num_groups, weight, bias, eps)]

    if group is None:
        return alone
    membership, shares = _shares(site, source, axes, size)
    sharing = Sharing(group, membership, shares, size * math.prod(shape[2:]))

    def together(*tensors: Tensor) -> list[Tensor]:
        x, weight, bias = pick(tensors)
        return [affine(_from_rows(Normalize.apply(_rows(x), sharing, eps), x), weight, bias, view)]

    return Alone(together)


def whole_groups(part: Indices, size: int) -> bool:
    """Whether channels are whole groups of consecutive channels, one after the other."""
    starts = part[::size]
    runs = (part[place : place + size] for place in range(0, len(part), size))
    return all(
        start % size == 0 and tuple(run) == tuple(range(start, start + size))
        for start, run in zip(starts, runs, strict=True)
    )


def _shares(site: Site, source: str, axes: Axes, size: int) -> tuple[tuple[int, ...], tuple[tuple[float, ...], ...]]:
    """The group of each of this rank's channels, among those that it and its partners have; each partner's shares."""
    shape, layout = site.graph.shape(source), site.layouts[source]
    parts = [
        [layout.parts(dim, site.mesh, place, shape[dim]) for dim in range(1, len(shape))]
        for place in site.mesh.group(site.coordinates, axes)
    ]
    numbers = sorted({channel // size for channels, *_ in parts for channel in channels})
    total = size * math.prod(shape[2:])
    shares = []
    for channels, *rest in parts:
        counts = Counter(channel // size for channel in channels)
        elements = math.prod(map(len, rest))
        shares.append(tuple(counts[number] * elements / total for number in numbers))
    membership = tuple(numbers.index(channel // size) for channel in site.parts(source, 1))
    return membership, tuple(shares)


def _rows(x: Tensor) -> Tensor:
    """`x` as [samples, channels, elements], without a copy."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1).flatten(1, 2).transpose(1, 2)
    return x.flatten(2) if x.dim() > 2 else x[..., None]


def _from_rows(y: Tensor, x: Tensor) -> Tensor:
    """The result in the shape and memory format of `x`."""
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        y = y.transpose(1, 2).unflatten(1, x.shape[2:])
        return y.permute(0, 3, 1, 2)
    return y.view(x.shape)


def _shared_dims(call: Call, graph: Graph, layout: Layout) -> set[int]:
    """Rows and columns, and the channels where those of a group lie on several ranks."""
    shape, split = graph.shape(call.attributes["input"]), layout.split(1)
    size = shape[1] // call.attributes["num_groups"]
    is_cut = split is not None and not all(whole_groups(part, size) for part in split.parts)
    return {*range(2, len(shape)), *([1] if is_cut else [])}


OPERATIONS = (
    Operation(
        "group_norm",
        by_channel,
        {"group_norm": _group_norm, "instance_norm": _instance_norm},
        _build,
        keeps=keeps_input,
        follows=True,
        passes=1.0,
        options=("num_groups",),
        shared_dims=_shared_dims,
        statistics=lambda call, shape: 2 * shape[0] * call.attributes["num_groups"],
        whole_precision=frozenset({"cuda"}),
    ),
)
