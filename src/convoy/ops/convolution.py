"""Convolutions, plain, grouped and transposed, split by samples, filters, input channels, rows or columns; linear
layers, which are 1 × 1 convolutions (column- and row-parallel), and products of matrices.

The strategies are those of Dryden et al., "Channel and Filter Parallelism for Large-Scale CNN Training" (SC 2019) and
"Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism" (IPDPS 2019).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.graph.graph import Call, Graph, Recognized, TorchCall, each
from convoy.ops import opaque
from convoy.ops.kernel import Kernel, Part, Site, flat_padding, postponing, with_bias
from convoy.ops.layouts import even, follow, groups_in, members, sample_split
from convoy.ops.operation import Operation, Shape, keeps_inputs, keeps_operands
from convoy.ops.postponed import Weighted
from convoy.plans.fit import axis_names, check_size
from convoy.plans.layout import Layout, Split
from convoy.plans.mesh import Axes
from convoy.plans.place import Batch, Placed, Situation
from convoy.plans.windows import Need, Transposed, Window, halo_split


def _convolution(call: TorchCall, transposed: bool) -> Recognized | None:
    defaults = {"output_padding": 0, "groups": 1, "dilation": 1} if transposed else {"dilation": 1, "groups": 1}
    attributes = call.bound(input=None, weight=None, bias=None, stride=1, padding=0, **defaults)
    kernel = call.shape(attributes["weight"])[2:]
    spatial = len(kernel)
    if len(call.shape(attributes["input"])) != spatial + 2:
        return None
    dilation = each(attributes["dilation"], spatial)
    if attributes["padding"] == "valid":
        padding = ((0, 0),) * spatial
    elif attributes["padding"] == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        padding = tuple((total // 2, total - total // 2) for total in totals)
    else:
        padding = tuple((p, p) for p in each(attributes["padding"], spatial))
    attributes |= {"stride": each(attributes["stride"], spatial), "padding": padding, "dilation": dilation}
    attributes |= {"transposed": transposed, "output_padding": each(attributes.get("output_padding", 0), spatial)}
    # Torch's own layer computes with its image as it is given; only such layers are called dilated.
    attributes["by_torch"] = type(call.module) is nn.Conv2d and call.module.padding_mode == "zeros"
    return Recognized("conv", attributes)


class Channels(NamedTuple):
    """How the channels of a convolution or linear layer are divided: of its input, its output, and the dimensions of
    its weight; axes over which the input's gradient is a sum, and over which the output is."""

    input: Split | None = None
    output: Split | None = None
    weight: Mapping[int, Split] = MappingProxyType({})
    copied: Axes = ()
    partial: Axes = ()


def undivided(graph: Graph, batch: Batch, call: Call, strategy: Sequence[str]) -> tuple[str, ...]:
    """A strategy that is to hold for all layers, for one that may have a single channel."""
    sizes = {"filter": graph.shape(call.outputs[0]), "channel": graph.shape(call.attributes["input"])}
    single = {kind for kind, shape in sizes.items() if shape[1 if call.op == "conv" else -1] == 1}
    whole = ("sample" if axis in batch.axes else "replicate" for axis in range(len(strategy)))
    return tuple(other if kind in single else kind for kind, other in zip(strategy, whole, strict=True))


def channels_of(situation: Situation, dim: int = 1, weight_dims: tuple[int, int] = (0, 1)) -> Channels:
    """Channels are at `dim` of input and output, those of the output and of the input at `weight_dims` of the
    weight."""
    mesh, source = situation.mesh, situation.call.attributes["input"]
    num_in, num_out = situation.shape(source)[dim], situation.shape(situation.call.outputs[0])[dim]
    filters, channels = situation.axes("filter"), situation.axes("channel")
    weight: dict[int, Split] = {}
    input_split = result_split = None
    if filters:
        check_size(situation.where, axis_names(mesh, filters), mesh.size(filters), "filter", num_out)
        result_split = weight[weight_dims[0]] = even(mesh, filters, num_out)
    if channels:
        check_size(situation.where, axis_names(mesh, channels), mesh.size(channels), "channel", num_in)
        input_split = weight[weight_dims[1]] = follow(situation, source, dim, channels, num_in)
    return Channels(input_split, result_split, weight, filters, channels)


def _grouped(situation: Situation) -> Channels:
    """Whole groups stay on their rank, so that nothing is sent: the two columns of Krizhevsky et al. (2012)."""
    call, mesh = situation.call, situation.mesh
    source, groups = call.attributes["input"], call.attributes["groups"]
    num_in, num_out = situation.shape(source)[1], situation.shape(call.outputs[0])[1]
    axes = situation.axes("filter", "channel")
    if not axes:
        return Channels()
    check_size(situation.where, axis_names(mesh, axes), mesh.size(axes), "filter", num_out, groups)
    in_size, out_size = num_in // groups, num_out // groups
    parts = [groups_in(part, in_size) for part in follow(situation, source, 1, axes, num_in).parts]
    whole_parts = [part for part in parts if part is not None]
    groups_of_parts = whole_parts if len(whole_parts) == len(parts) else even(mesh, axes, groups).parts
    input_split = Split(axes, tuple(members(part, in_size) for part in groups_of_parts))
    result_split = Split(axes, tuple(members(part, out_size) for part in groups_of_parts))
    return Channels(input_split, result_split, {0: input_split if call.attributes["transposed"] else result_split})


def place(situation: Situation) -> Placed:
    """Lay out an input [samples, channels, (depth,) height, width] or [samples, channels, length]."""
    call = situation.call
    weight_dims = (1, 0) if call.attributes["transposed"] else (0, 1)
    channels = _grouped(situation) if call.attributes["groups"] > 1 else channels_of(situation, 1, weight_dims)
    samples = sample_split(situation, call.attributes["input"])
    in_splits, out_splits = (
        {dim: split for dim, split in ((0, samples), (1, of_channels)) if split is not None}
        for of_channels in (channels.input, channels.output)
    )
    shared = {*situation.axes("sample"), *_rows(situation, in_splits, out_splits)}
    return _with_parameters(situation, channels, in_splits, out_splits, shared)


def _with_parameters(
    situation: Situation,
    channels: Channels,
    in_splits: dict[int, Split],
    out_splits: dict[int, Split],
    shared: set[int],
) -> Placed:
    """The layouts of a layer; ranks along the axes `shared` have the same part of weight and bias."""
    source, weight, bias = (situation.call.attributes[name] for name in ("input", "weight", "bias"))
    inputs = {source: Layout.of(in_splits, copied=channels.copied), weight: Layout.of(channels.weight, copied=shared)}
    if bias is not None:
        inputs[bias] = Layout.of({0: channels.output} if channels.output else {}, copied=shared)
    return Placed(inputs, {situation.call.outputs[0]: Layout.of(out_splits, partial=channels.partial)})


def _rows(situation: Situation, in_splits: dict[int, Split], out_splits: dict[int, Split]) -> Axes:
    """Divide the rows and columns of the output, and ask for the input's with their halo."""
    call = situation.call
    spatial_axes: Axes = ()
    for dim, axes, name in spatial_dims(situation, len(situation.shape(call.outputs[0]))):
        size = situation.shape(call.outputs[0])[dim]
        check_size(situation.where, axis_names(situation.mesh, axes), situation.mesh.size(axes), name, size)
        out_splits[dim] = even(situation.mesh, axes, size)
        in_splits[dim] = halo_split(window_of(situation.graph, call, dim), out_splits[dim])
        spatial_axes += axes
    return spatial_axes


def spatial_dims(situation: Situation, num_dims: int) -> list[tuple[int, Axes, str]]:
    """The dimensions that the strategies `height` and `width` divide; a signal has but one, that either divides. A
    single number, as behind a global pooling, is not divided: such a layer is a linear one."""
    if num_dims == 3:
        dims = [(2, situation.axes("height", "width"), "width")]
    else:
        dims = [(num_dims - 2, situation.axes("height"), "height"), (num_dims - 1, situation.axes("width"), "width")]
    before, after = situation.shape(situation.call.attributes["input"]), situation.shape(situation.call.outputs[0])
    return [(dim, axes, name) for dim, axes, name in dims if axes and max(before[dim], after[dim]) > 1]


def window_of(graph: Graph, call: Call, dim: int) -> Window | Transposed:
    """The window that slides over a dimension of a convolution's input."""
    attributes, index = call.attributes, dim - 2
    size, kernel = graph.shape(attributes["input"])[dim], graph.shape(attributes["weight"])[dim]
    stride, dilation, (before, after) = (attributes[name][index] for name in ("stride", "dilation", "padding"))
    if attributes["transposed"]:
        return Transposed(size, kernel, stride, dilation, before, after, attributes["output_padding"][index])
    return Window(size, kernel, stride, dilation, before, after)


def _needs(part: Part) -> list[Need]:
    """What a rank needs of every spatial dimension for its part of the output."""
    dims = range(2, len(part.graph.shape(part.output)))
    return [window_of(part.graph, part.call, dim).needed(part.rows(dim)) for dim in dims]


def paddings_of(part: Part) -> list[tuple[int, int, int]]:
    """The padding of a rank, for each spatial dimension of a convolution that is not transposed: the same at both ends,
    which the convolution does itself, then the rest at either end, which takes a copy of the input."""
    ends = [
        padding if part.layouts[part.output].split(2 + index) is None else (need.before, need.after)
        for index, (padding, need) in enumerate(zip(part.call.attributes["padding"], _needs(part), strict=True))
    ]
    return [(min(end), end[0] - min(end), end[1] - min(end)) for end in ends]


def _local_groups(part: Part) -> int:
    """The number of groups of a convolution that a rank has."""
    groups, source = part.call.attributes["groups"], part.call.attributes["input"]
    size = part.graph.shape(source)[1] // groups
    return max(1, len(part.parts(source, 1)) // size) if groups > 1 else 1


def _build(site: Site) -> Kernel:
    """A kernel that pads only at the picture's true border, and has whole groups."""
    return with_bias(site, _local(site), 1)


def _local(site: Site) -> Callable[..., Tensor]:
    """A function of (input, weight, bias or None)."""
    attributes = site.call.attributes
    transposed, num_dims = attributes["transposed"], len(attributes["stride"])
    function = getattr(F, f"conv{'_transpose' if transposed else ''}{num_dims}d")
    options: dict[str, Any] = {name: attributes[name] for name in ("stride", "dilation")}
    options["groups"] = _local_groups(site)
    if transposed:
        return _transposed(site, function, options)
    paddings = paddings_of(site)
    options["padding"] = tuple(both for both, _, _ in paddings)
    flat = flat_padding([(before, after) for _, before, after in paddings])
    layer = weighted(function, options)
    sizes = site.graph.shape(attributes["weight"])[2:], options["stride"], options["dilation"]
    if attributes["by_torch"] and sizes == (_POINT, _POINT, _POINT):
        layer = _pointwise(layer, weighted(function, options | {"dilation": _DILATED}))
    compute = postponing(site, layer)
    return (lambda x, weight, bias: compute(F.pad(x, flat), weight, bias)) if any(flat) else compute


def weighted(function: Callable[..., Tensor], options: dict[str, Any], transposed: bool = False) -> Weighted:
    """A convolution, and its gradients as autograd computes them; `options` are those of torch's function."""
    kinds = ("stride", "padding", "dilation")
    extra = options.get("output_padding", (0,) * len(options["stride"]))
    settings = *(options[kind] for kind in kinds), transposed, extra, options["groups"]

    def input_gradient(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, *settings, (True, False, False)
        )[0]
        return result

    def weight_gradients(gradient: Tensor, x: Tensor, weight: Tensor, biased: bool) -> tuple[Tensor, Tensor | None]:
        sizes = [gradient.shape[1]] if biased else None
        gradients = torch.ops.aten.convolution_backward(gradient, x, weight, sizes, *settings, (False, True, biased))
        return gradients[1], gradients[2] if biased else None

    return Weighted(partial(function, **options), input_gradient, weight_gradients)


def _transposed(site: Site, function: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    attributes, needs = site.call.attributes, _needs(site)
    if not _divides_rows(site) and all(before == after for before, after in attributes["padding"]):
        options["padding"] = tuple(before for before, _ in attributes["padding"])
        options["output_padding"] = attributes["output_padding"]
        return postponing(site, weighted(function, options, transposed=True))
    flat = flat_padding([(need.before, need.after) for need in needs])
    empty, shape = any(not need.rows for need in needs), site.local_shape(site.output)

    def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if empty:
            y = x.new_zeros(shape) + (x.sum() + weight.sum()) * 0
        else:
            y = F.pad(function(x, weight, None, **options), flat)
        return y if bias is None else y + bias.view(-1, *[1] * len(needs)).to(y.dtype)

    return convolve


def _divides_rows(part: Part) -> bool:
    return any(dim > 1 for dim, _ in part.layouts[part.output].splits)


def _multiplications(operands: Sequence[Shape], output: Shape, transposed: bool) -> int:
    larger = operands[0] if transposed else output  # every number of the larger side meets one group's filters
    return larger[0] * prod(larger[2:]) * prod(operands[1])


def _options(part: Part) -> dict[str, Any]:
    """The rank's own groups and padding: the same at both ends, then the rest before and after."""
    attributes, options = part.call.attributes, bias_option(part)
    options["groups"] = _local_groups(part)
    if not attributes["transposed"]:
        options["padding"] = paddings_of(part)
    elif _divides_rows(part):
        options["padding"] = [(0, need.before, need.after) for need in _needs(part)]
    else:
        options["padding"] = [(before, 0, after - before) for before, after in attributes["padding"]]
        options["output_padding"] = attributes["output_padding"]
    return options


def bias_option(part: Part) -> dict[str, Any]:
    """Whether the rank adds the bias, where the output is a partial sum; for the costs of a call with a bias."""
    axes = part.layouts[part.output].partial
    return {"bias": part.is_first(axes)} if axes and part.call.attributes["bias"] is not None else {}


# 1 × 1 convolutions of small passes on CPUs, which torch leaves to a slower kernel than oneDNN's.

_POINT, _DILATED = (1, 1), (2, 2)
_FEW_SAMPLES = 16
# numbers of a single sample up to which torch computes it without oneDNN in any case (`use_mkldnn`)
_SMALL_IMAGE = 20480
# multiplications for which oneDNN is worth the 100 µs that it takes to begin; measured from 2**20 to 2**25
_WORTH_ONEDNN = 2**22


def is_better_dilated(x: Tensor, weight: Tensor) -> bool:
    """Whether a convolution with filters of 1 × 1 is faster when it is called dilated, which changes nothing else.

    With one thread and fewer than 16 samples, torch 2.13 computes such a convolution in float32 without oneDNN, by a
    matrix product for each sample (`use_mkldnn` in its Convolution.cpp), which takes a pass of 8 images through
    ResNet-50 up to 2.26 times as long (docs/benchmarks/small-passes.md). A dilated convolution goes to oneDNN, but for
    a single small image. `torch.mkldnn_convolution` would, too, but its backward pass chooses anew.

    >>> x, weight = torch.ones(8, 1024, 4, 4), torch.ones(256, 1024, 1, 1)
    >>> torch.equal(F.conv2d(x, weight, dilation=2), F.conv2d(x, weight))
    True
    """
    if torch.compiler.is_compiling() or x.dtype != torch.float32 or x.device.type != "cpu":
        return False
    samples, _, *pixels = x.shape
    if samples >= _FEW_SAMPLES or prod(pixels) == 1 or samples * prod(pixels) * weight.numel() < _WORTH_ONEDNN:
        return False
    if (samples == 1 and x.numel() <= _SMALL_IMAGE) or torch.is_autocast_enabled("cpu"):
        return False
    has_onednn = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    return has_onednn and torch.get_num_threads() == 1


def _pointwise(plain: Weighted, dilated: Weighted) -> Weighted:
    """A convolution with filters of 1 × 1, called as is faster; its gradients go the way of its forward pass."""

    def of(x: Tensor, weight: Tensor) -> Weighted:
        return dilated if is_better_dilated(x, weight) else plain

    return Weighted(
        lambda x, weight, bias: of(x, weight).compute(x, weight, bias),
        lambda gradient, x, weight: of(x, weight).input_gradient(gradient, x, weight),
        lambda gradient, x, weight, biased: of(x, weight).weight_gradients(gradient, x, weight, biased),
    )


# Linear layers, and products of matrices.


def _linear(call: TorchCall) -> Recognized | None:
    arguments = call.bound(input=None, weight=None, bias=None)
    if len(call.shape(arguments["weight"])) != 2 or len(call.shape(arguments["input"])) < 2:
        return None
    return Recognized("linear", arguments)


def _matmul(call: TorchCall) -> Recognized | None:
    if len(call.operands) != 2:
        return None
    return Recognized("matmul", call.bound(input=None, **{"other" if call.name == "matmul" else "mat2": None}))


def _place_linear(situation: Situation) -> Placed:
    """Input [samples, ..., features]; rows and columns stay where they are, since each is worked on by itself."""
    source = situation.call.attributes["input"]
    last = len(situation.shape(source)) - 1
    splits = _kept(situation, source, last)
    shared = {axis for split in splits.values() for axis in split.axes}
    channels = channels_of(situation, last)
    in_splits, out_splits = (
        splits | ({} if split is None else {last: split}) for split in (channels.input, channels.output)
    )
    return _with_parameters(situation, channels, in_splits, out_splits, shared)


def _kept(situation: Situation, source: str, last: int) -> dict[int, Split]:
    """Splits of samples, rows and columns under which the layer works."""
    axes = situation.axes("sample", "height", "width")
    layout = situation.given.get(source, Layout())
    splits = {dim: split for dim, split in layout.splits if dim != last and set(split.axes) <= set(axes)}
    samples = situation.axes("sample")
    if last > 0 and situation.shape(source)[0] == situation.batch.num_samples and samples:
        splits = {dim: split for dim, split in splits.items() if not set(split.axes) & set(samples)}
        split = situation.batch.split(samples)
        assert split is not None
        splits[0] = split
    return splits


def _build_linear(site: Site) -> Kernel:
    """Column-parallel parts give their own features, row-parallel ones a partial sum."""
    compute = postponing(site, Weighted(F.linear, lambda gradient, x, weight: gradient @ weight, _weight_gradients))
    return with_bias(site, compute, len(site.graph.shape(site.call.outputs[0])) - 1)


def _weight_gradients(gradient: Tensor, x: Tensor, weight: Tensor, biased: bool) -> tuple[Tensor, Tensor | None]:
    rows = gradient.flatten(0, -2)
    return rows.t() @ x.flatten(0, -2), rows.sum(0) if biased else None


def _place_matmul(situation: Situation) -> Placed:
    """Products of a batch of matrices stay split by samples; everything else is whole."""
    call = situation.call
    a, b = call.attributes.values()
    samples = situation.given[a].split(0) if a in situation.given else None
    is_batched = len(situation.shape(a)) >= 3 and len(situation.shape(a)) == len(situation.shape(b))
    same_length = situation.shape(a)[0] == situation.shape(b)[0] == situation.shape(call.outputs[0])[0]
    if samples is None or not is_batched or not same_length:
        return opaque.place(situation)
    layout = Layout.of({0: samples})
    return Placed({a: layout, b: layout}, {call.outputs[0]: layout})


OPERATIONS = (
    Operation(
        "conv",
        place,
        {
            **{f"conv{n}d": partial(_convolution, transposed=False) for n in (1, 2, 3)},
            **{f"conv_transpose{n}d": partial(_convolution, transposed=True) for n in (1, 2, 3)},
        },
        _build,
        keeps=keeps_operands,
        gives_own=True,
        multiplications=_multiplications,
        options=("stride", "dilation", "transposed"),
        local_options=_options,
        is_lowered=True,
    ),
    Operation(
        "linear",
        _place_linear,
        {"linear": _linear},
        _build_linear,
        keeps=keeps_operands,
        gives_own=True,
        multiplications=lambda operands, output, transposed: prod(operands[0][:-1]) * prod(operands[1]),
        local_options=bias_option,
        is_lowered=True,
    ),
    Operation(
        "matmul",
        _place_matmul,
        dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
        keeps=keeps_inputs,
        multiplications=lambda operands, output, transposed: prod(output) * operands[0][-1],
        is_lowered=True,
    ),
)
