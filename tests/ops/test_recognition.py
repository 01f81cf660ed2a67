"""Every family of functions, as a network calls it: op, attributes, and the same numbers when it is replayed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.graph import Call
from convoy.ops import capture
from graph.replay import replay, same

SHAPE = (2, 4, 6, 6)


class Function(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.w = nn.Parameter(torch.randn(4, 2, 3, 3))
        self.b = nn.Parameter(torch.randn(4))
        self.w1 = nn.Parameter(torch.randn(4, 4, 3))
        self.fc = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def calls_of(function: Callable[[Any, Tensor], Any]) -> tuple[Call, ...]:
    model, images = Function(function), torch.randn(SHAPE)
    graph = capture(model, (images,))
    if not any(call.op in ("dropout", "random") for call in graph.calls):
        assert same(replay(graph, model, (images,)), model(images.clone()))
    return graph.calls


POOL = {"padding": (0, 0), "ceil_mode": False, "dilation": (1, 1), "count_include_pad": True, "divisor_override": None}
CASES: dict[str, tuple[Callable[[Any, Tensor], Any], str, dict[str, Any]]] = {
    "conv2d": (
        lambda m, x: F.conv2d(x, m.w, m.b, 2, (1, 0), groups=2),
        "conv",
        {"weight": "w", "bias": "b", "stride": (2, 2), "padding": ((1, 1), (0, 0)), "dilation": (1, 1), "groups": 2},
    ),
    "same": (
        lambda m, x: F.conv2d(x, m.w[..., :2], padding="same", dilation=(1, 3), groups=2),
        "conv",
        {"padding": ((1, 1), (1, 2)), "bias": None},
    ),
    "valid": (lambda m, x: F.conv2d(x, m.w, groups=2, padding="valid"), "conv", {"padding": ((0, 0), (0, 0))}),
    "conv1d": (lambda m, x: F.conv1d(x[..., 0], m.w1, None, [2]), "conv", {"stride": (2,), "transposed": False}),
    "conv_transpose": (
        lambda m, x: F.conv_transpose2d(x, m.w, stride=2, padding=1, output_padding=1, groups=2),
        "conv",
        {"transposed": True, "output_padding": (1, 1), "padding": ((1, 1), (1, 1)), "groups": 2},
    ),
    "linear": (lambda m, x: F.linear(x, m.fc), "linear", {"input": "x", "weight": "fc", "bias": None}),
    "matmul": (lambda m, x: x @ x.mT, "matmul", {"a": "x", "b": "get"}),
    "batch norm": (
        lambda m, x: F.batch_norm(x, None, None, m.b, m.b, True),
        "batch_norm",
        {"weight": "b", "eps": 1e-5},
    ),
    "group norm": (lambda m, x: F.group_norm(x, 2, m.b, eps=1e-3), "group_norm", {"num_groups": 2, "eps": 1e-3}),
    "instance norm": (lambda m, x: F.instance_norm(x, weight=m.b), "group_norm", {"num_groups": 4, "weight": "b"}),
    "layer norm": (lambda m, x: F.layer_norm(x, [6, 6]), "layer_norm", {"normalized_shape": (6, 6), "weight": None}),
    "rms norm": (lambda m, x: F.rms_norm(x, [6, 6]), "rms_norm", {"normalized_shape": (6, 6), "eps": None}),
    "lrn": (lambda m, x: F.local_response_norm(x, 5, k=2.0), "lrn", {"size": 5, "alpha": 1e-4, "beta": 0.75, "k": 2.0}),
    "max pool": (lambda m, x: F.max_pool2d(x, 2), "max_pool", {**POOL, "kernel": (2, 2), "stride": (2, 2)}),
    "max pool method": (
        lambda m, x: torch.max_pool2d(x, 3, [1, 2], 1, ceil_mode=True),
        "max_pool",
        {"stride": (1, 2), "padding": (1, 1), "ceil_mode": True},
    ),
    "avg pool": (
        lambda m, x: F.avg_pool2d(x, (2, 3), 1, count_include_pad=False, divisor_override=5),
        "avg_pool",
        {**POOL, "kernel": (2, 3), "stride": (1, 1), "count_include_pad": False, "divisor_override": 5},
    ),
    "pool of one image": (lambda m, x: F.avg_pool2d(x[0], 2)[None], "opaque", {}),
    "adaptive": (lambda m, x: F.adaptive_avg_pool2d(x, (None, 2)), "adaptive_avg_pool", {"output_size": (6, 2)}),
    "adaptive max": (lambda m, x: nn.AdaptiveMaxPool2d(3)(x), "adaptive_max_pool", {"output_size": (3, 3)}),
    "pool with indices": (lambda m, x: F.max_pool2d(x, 2, return_indices=True)[0], "opaque", {}),
    "dropout": (lambda m, x: F.dropout(x, 0.3), "dropout", {"p": 0.3, "channels": False}),
    "dropout2d": (lambda m, x: F.dropout2d(x, 0.3, True, True), "dropout", {"p": 0.3, "channels": True}),
    "feature dropout": (lambda m, x: torch.feature_dropout(x, 0.3, True), "dropout", {"channels": True}),
    "cat": (lambda m, x: torch.cat([x, x * 2], -3), "cat", {"operands": ("x", "mul"), "dim": 1}),
    "concat": (lambda m, x: torch.concat((x, x), axis=1), "cat", {"operands": ("x", "x"), "dim": 1}),
    "flatten": (lambda m, x: x.flatten(1), "reshape", {"input": "x"}),
    "view as": (lambda m, x: x.view_as(x.new_zeros(2, 144)), "reshape", {"input": "x"}),
    "unflatten": (lambda m, x: x.unflatten(1, (2, 2)), "reshape", {}),
    "permute": (lambda m, x: x.permute(0, 2, -1, 1), "permute", {"order": (0, 2, 3, 1)}),
    "permute list": (lambda m, x: torch.permute(x, [0, 2, 3, 1]), "permute", {"order": (0, 2, 3, 1)}),
    "transpose": (lambda m, x: x.transpose(-1, 1), "permute", {"order": (0, 3, 2, 1)}),
    "movedim": (lambda m, x: x.movedim(1, -1), "permute", {"order": (0, 2, 3, 1)}),
    "mT": (lambda m, x: x.mT, "permute", {"order": (0, 1, 3, 2)}),
    "chunk": (lambda m, x: x.chunk(3, 1)[0], "split", {"dim": 1, "sizes": (2, 2)}),
    "split": (lambda m, x: torch.split(x, [1, 3], dim=-3)[1], "split", {"dim": 1, "sizes": (1, 3)}),
    "tensor split": (lambda m, x: x.tensor_split(2, dim=3)[1], "split", {"dim": 3, "sizes": (3, 3)}),
    "slice": (
        lambda m, x: x[:, 1:, ..., ::2],
        "select",
        {"ranges": ((0, 2, 1), (1, 4, 1), (0, 6, 1), (0, 6, 2))},
    ),
    "place": (lambda m, x: x[:, -1], "select", {"ranges": ((0, 2, 1), 3, (0, 6, 1), (0, 6, 1))}),
    "narrow": (lambda m, x: x.narrow(1, 1, 2), "select", {"ranges": ((0, 2, 1), (1, 3, 1), (0, 6, 1), (0, 6, 1))}),
    "unbind": (lambda m, x: x.unbind(1)[2], "select", {"ranges": ((0, 2, 1), 2, (0, 6, 1), (0, 6, 1))}),
    "list index": (lambda m, x: x[:, [0, 2]], "opaque", {}),
    "mean": (lambda m, x: x.mean((-1, 2)), "reduce", {"function": "mean", "dims": (2, 3), "keepdim": False}),
    "sum": (lambda m, x: torch.sum(x, 1, keepdim=True), "reduce", {"function": "sum", "dims": (1,), "keepdim": True}),
    "amax": (lambda m, x: x.amax(dim=1), "reduce", {"function": "amax", "dims": (1,)}),
    "mean of all": (lambda m, x: x.mean(), "reduce", {"dims": (0, 1, 2, 3)}),
    "softmax": (lambda m, x: F.softmax(x, -3), "softmax", {"dim": 1, "function": "softmax"}),
    "log softmax": (lambda m, x: x.log_softmax(1), "softmax", {"dim": 1, "function": "log_softmax"}),
    "interpolate": (
        lambda m, x: F.interpolate(x, scale_factor=1.5, mode="bilinear", align_corners=False),
        "interpolate",
        {"output_size": (9, 9), "scale": (1.5, 1.5), "mode": "bilinear", "align_corners": False},
    ),
    "upsample": (lambda m, x: nn.Upsample(size=(7, 8))(x), "interpolate", {"output_size": (7, 8), "scale": None}),
    "pad": (lambda m, x: F.pad(x, (1, 2, 0, 3)), "pad", {"pads": ((0, 0), (0, 0), (0, 3), (1, 2)), "mode": "constant"}),
    "reflect": (lambda m, x: nn.ReflectionPad2d(1)(x), "pad", {"mode": "reflect"}),
    "prelu": (lambda m, x: F.prelu(x, m.b), "elementwise", {"channel_operand": "b"}),
    "expand": (lambda m, x: x.mean(1, keepdim=True).expand(-1, 4, 6, 6), "elementwise", {}),
    "expand as": (lambda m, x: x.mean((2, 3), keepdim=True).expand_as(x), "elementwise", {}),
    "no expansion": (lambda m, x: x.expand(2, 4, -1, 6), "identity", {}),
    "clone": (lambda m, x: x.clone(), "identity", {"input": "x"}),
    "contiguous": (lambda m, x: x.permute(0, 2, 3, 1).contiguous(), "identity", {}),
    "channels last": (lambda m, x: x.to(memory_format=torch.channels_last), "identity", {}),
    "double": (lambda m, x: x.double(), "elementwise", {}),
    "einsum": (lambda m, x: torch.einsum("nchw,nchw->nc", x, x), "opaque", {}),
    "attention": (lambda m, x: F.scaled_dot_product_attention(x, x, x), "opaque", {"independent": (0, 1)}),
    "normalize": (lambda m, x: F.normalize(x), "opaque", {"independent": (0, 2, 3)}),
    "windows": (lambda m, x: x.unfold(2, 3, 1), "opaque", {"independent": (0, 1, 3)}),
    "patches": (lambda m, x: F.unfold(x, 3), "opaque", {"independent": (0,)}),
    "roll": (lambda m, x: x.roll((1, 1), (2, 3)), "opaque", {"independent": (0, 1)}),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_op_and_attributes() -> None:
    wrong = []
    for case, (function, op, attributes) in CASES.items():
        calls = [call for call in calls_of(function) if call.op == op]
        given = {name: calls[-1].attributes[name] for name in attributes} if calls else None
        wrong += [] if given == attributes else [f"{case}: {given}"]
    assert not wrong, "\n".join(wrong)


ELEMENTWISE: list[Callable[[Any, Tensor], Any]] = [
    lambda m, x: 1 - x + 2 * x - x / 2 + 1 / (x + 3) - (-x) ** 2 + 2**x,
    lambda m, x: (x > 0) & (x < 1) | (x == 0) | ~(x <= 1),
    lambda m, x: torch.where(x > 0, x, x.exp()).clamp(0, 1).maximum(x.abs().sqrt()),
    lambda m, x: x.masked_fill(x > 0, 0.5) + x // 2 + x % 2,
    lambda m, x: F.relu6(x) + F.leaky_relu(x, 0.1, True) + F.silu(x) + F.gelu(x, approximate="tanh") + F.mish(x),
    lambda m, x: nn.Hardswish(True)(x * 1) + nn.Hardsigmoid()(x) + nn.Softplus()(x) + nn.ELU(inplace=True)(x * 1),
    lambda m, x: x.add(1).relu_().mul_(2).sub_(x).sigmoid_().clamp_(0.1, 0.4).add_(m.b.view(1, -1, 1, 1), alpha=2),
    lambda m, x: F.hardtanh_(x * 1) + torch.relu_(x * 2) + F.threshold(x, 0.1, 20) + torch.tanh(x) + x.sigmoid(),
    lambda m, x: torch.rsub(x, 1) + torch.max(x, x * 2) + torch.addcmul(x, x, x, value=0.5) + x.square().log1p(),
]


def test_functions_of_single_numbers() -> None:
    for function in ELEMENTWISE:
        made = [call for call in calls_of(function) if call.inputs != ("b",)]
        assert {call.op for call in made} == {"elementwise"}
        assert not any(call.kwargs.get("inplace") for call in made)
        names = [getattr(call.function, "__name__", "") for call in made]
        assert not any(name.endswith("_") and not name.startswith("_") for name in names), names


SIMPLER: list[tuple[Callable[[Any, Tensor], Any], set[str]]] = [
    (lambda m, x: torch.stack([x, x], 2), {"reshape", "cat"}),
    (lambda m, x: F.channel_shuffle(x, 2), {"reshape", "permute"}),
    (lambda m, x: F.pixel_shuffle(x, 2), {"reshape", "permute"}),
    (lambda m, x: F.pixel_unshuffle(x, 2), {"reshape", "permute"}),
    (lambda m, x: F.glu(x, 1), {"split", "elementwise"}),
    (lambda m, x: x[:, None, ..., 1:, None], {"select", "reshape"}),
    (lambda m, x: x[:, 0, None], {"select", "reshape"}),
    (lambda m, x: x[None], {"reshape"}),
]


def test_functions_that_are_several_simpler_ones() -> None:
    for number, (function, ops) in enumerate(SIMPLER):
        assert {call.op for call in calls_of(function)} == ops, number


def test_inactive_dropout_and_conversions_to_the_same_are_no_work() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.5, False)
        x = F.alpha_dropout(x, 0.5, False)
        return F.dropout2d(x, 0.0).contiguous().float().to("cpu").type_as(x) * 2

    assert {call.op for call in calls_of(function)} <= {"identity", "elementwise"}
