"""Linear layers, which are 1×1 convolutions (column- and row-parallel), and products of matrices."""

from math import prod

import torch.nn.functional as F
from torch import Tensor

from convoy.graph.graph import Recognized, TorchCall
from convoy.ops import opaque
from convoy.ops.convolution import bias_option, channels_of
from convoy.ops.kernel import Kernel, Site, postponing, with_bias
from convoy.ops.operation import Operation, keeps_inputs, keeps_operands
from convoy.ops.postponed import Weighted
from convoy.plans.layout import Layout, Split
from convoy.plans.place import Placed, Situation


def _linear(call: TorchCall) -> Recognized | None:
    arguments = call.bound(input=None, weight=None, bias=None)
    if len(call.shape(arguments["weight"])) != 2 or len(call.shape(arguments["input"])) < 2:
        return None
    return Recognized("linear", arguments)


def _matmul(call: TorchCall) -> Recognized | None:
    if len(call.operands) != 2:
        return None
    a, b = call.operands
    return Recognized("matmul", {"a": a, "b": b})


def place(situation: Situation) -> Placed:
    """Input [samples, ..., features]; rows and columns stay where they are, since each is worked on by itself."""
    call = situation.call
    source, weight, bias = (call.attributes[name] for name in ("input", "weight", "bias"))
    last = len(situation.shape(source)) - 1
    splits = _kept(situation, source, last)
    shared = {axis for split in splits.values() for axis in split.axes}
    channels = channels_of(situation, last)
    in_splits, out_splits = (
        splits | ({} if split is None else {last: split}) for split in (channels.input, channels.output)
    )
    inputs = {source: Layout.of(in_splits, copied=channels.copied), weight: Layout.of(channels.weight, copied=shared)}
    if bias is not None:
        inputs[bias] = Layout.of({0: channels.output} if channels.output else {}, copied=shared)
    return Placed(inputs, {call.outputs[0]: Layout.of(out_splits, partial=channels.partial)})


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


def _build(site: Site) -> Kernel:
    """Column-parallel parts give their own features, row-parallel ones a partial sum."""
    compute = postponing(site, Weighted(F.linear, _input_gradient, _weight_gradients))
    return with_bias(site, compute, len(site.graph.shape(site.call.outputs[0])) - 1)


def _input_gradient(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return gradient @ weight


def _weight_gradients(gradient: Tensor, x: Tensor, weight: Tensor, biased: bool) -> tuple[Tensor, Tensor | None]:
    rows = gradient.flatten(0, -2)
    return rows.t() @ x.flatten(0, -2), rows.sum(0) if biased else None


def _place_matmul(situation: Situation) -> Placed:
    """Products of a batch of matrices stay split by samples; everything else is whole."""
    call = situation.call
    a, b = call.attributes["a"], call.attributes["b"]
    samples = situation.given[a].split(0) if a in situation.given else None
    is_batched = len(situation.shape(a)) >= 3 and len(situation.shape(a)) == len(situation.shape(b))
    same_length = situation.shape(a)[0] == situation.shape(b)[0] == situation.shape(call.outputs[0])[0]
    if samples is None or not is_batched or not same_length:
        return opaque.place(situation)
    layout = Layout.of({0: samples})
    return Placed({a: layout, b: layout}, {call.outputs[0]: layout})


OPERATIONS = (
    Operation(
        "linear",
        place,
        {"linear": _linear},
        _build,
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
