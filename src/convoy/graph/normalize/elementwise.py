"""Functions of single numbers, with torch's broadcasting; and those that change nothing."""

from functools import partial
from typing import Any

import torch

from convoy.graph.graph import Ref, expand_like
from convoy.graph.normalize.seen import Normal, Normalizer, Seen

ACTIVATIONS = (
    *("relu", "relu6", "leaky_relu", "elu", "celu", "selu", "silu", "gelu", "mish", "hardswish", "hardsigmoid"),
    *("hardtanh", "hardshrink", "softshrink", "tanhshrink", "threshold", "sigmoid", "logsigmoid", "tanh", "softplus"),
    *("softsign", "expit"),
)
ARITHMETIC = (
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "remainder"),
    *("fmod", "pow", "float_power", "square", "neg", "negative", "positive", "reciprocal", "exp", "exp2", "expm1"),
    *("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "abs", "absolute", "sign", "sin", "cos", "tan", "atan"),
    *("atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "floor", "ceil", "round", "trunc", "frac"),
    *("clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum", "max", "min", "fmax", "fmin", "where"),
    *("lerp", "addcmul", "addcdiv", "masked_fill", "nan_to_num", "rsub", "logaddexp", "hypot", "detach", "bool"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor", "isnan"),
    *("bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor", "isinf", "isfinite"),
)
OPERATORS = (  # of python, as torch's methods call them without their underscores
    *("rsub", "rdiv", "rtruediv", "truediv", "rpow", "floordiv", "rfloordiv", "mod", "rmod", "radd", "rmul"),
    *("and", "or", "xor", "rand", "ror", "rxor", "invert"),
)
CONVERSIONS = ("to", "float", "double", "half", "bfloat16", "int", "long", "type_as", "type", "contiguous", "clone")


def _elementwise(seen: Seen) -> Normal | None:
    operands = seen.operands
    if len(seen.outputs) != 1 or not operands:
        return None
    try:
        broadcast = torch.broadcast_shapes(*(seen.shape(name) for name in operands))
    except RuntimeError:
        return None
    return Normal("elementwise") if tuple(broadcast) == seen.output else None


def _prelu(seen: Seen) -> Normal:
    found = seen.bound(input=None, weight=None)
    per_channel = seen.shape(found["weight"]) not in ((), (1,))
    return Normal("elementwise", {"channel_operand": found["weight"]} if per_channel else {})


def _convert(seen: Seen) -> Normal:
    before, after = seen.values[seen.input], seen.outputs[0]
    if before.dtype == after.dtype and len(seen.operands) == 1:
        return Normal("identity", {"input": seen.input})
    return Normal("elementwise", {}, torch.Tensor.to, (Ref(seen.input), after.dtype), {})


def _dropout(seen: Seen, channels: bool) -> Normal | None:
    found = seen.bound(input=None, p=0.5, training=True, train=True)
    if seen.name in ("dropout", "feature_dropout") and "train" in seen.kwargs:
        found["training"] = found["train"]
    if not found["training"] or found["p"] == 0:
        return Normal("identity", {"input": seen.input})
    if channels and len(seen.shape(seen.input)) < 3:
        return None
    return Normal("dropout", {"input": seen.input, "p": float(found["p"]), "channels": channels})


def _inactive(seen: Seen) -> Normal | None:
    """Alpha dropout, for which there is no rule while it draws."""
    inactive = not seen.bound(input=None, p=0.5, training=False)["training"]
    return Normal("identity", {"input": seen.input}) if inactive else None


def _expand(seen: Seen) -> Normal | None:
    if seen.output == seen.shape(seen.input):
        return Normal("identity", {"input": seen.input}, torch.Tensor.clone, (Ref(seen.input),), {})
    others: list[Any] = [name for name in seen.operands[1:] if seen.shape(name) == seen.output]
    if not others:
        return None
    return Normal("elementwise", {}, expand_like, (Ref(seen.input), Ref(others[0])), {})


NORMALIZERS: dict[str, Normalizer] = {
    **dict.fromkeys((*ACTIVATIONS, *ARITHMETIC, *OPERATORS), _elementwise),
    **dict.fromkeys(CONVERSIONS, _convert),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **{name: partial(_dropout, channels=True) for name in ("dropout1d", "dropout2d", "dropout3d", "feature_dropout")},
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), _inactive),
    "dropout": partial(_dropout, channels=False),
    "prelu": _prelu,
}
