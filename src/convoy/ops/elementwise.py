"""Functions of single numbers with torch's broadcasting: they follow the layout of what they are given."""

from collections.abc import Mapping
from typing import Any

import torch

from convoy.graph.graph import Call, Recognized, Ref, TorchCall, Value, expand_like
from convoy.ops.layouts import agreed, operand
from convoy.ops.operation import Kept, Operation
from convoy.plans.layout import Layout
from convoy.plans.place import Placed, Situation

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
    *("rsub", "rdiv", "rpow", "floordiv", "rfloordiv", "rmod", "and", "or", "xor", "invert"),
)


CONVERSIONS = ("to", "float", "double", "half", "bfloat16", "int", "long", "type_as", "type", "contiguous", "clone")


def _elementwise(call: TorchCall) -> Recognized | None:
    operands = call.operands
    if len(call.outputs) != 1 or not operands:
        return None
    try:
        broadcast = torch.broadcast_shapes(*(call.shape(name) for name in operands))
    except RuntimeError:
        return None
    return Recognized("elementwise") if tuple(broadcast) == call.output else None


def _prelu(call: TorchCall) -> Recognized:
    arguments = call.bound(input=None, weight=None)
    per_channel = call.shape(arguments["weight"]) not in ((), (1,))
    return Recognized("elementwise", {"channel_operand": arguments["weight"]} if per_channel else {})


def _convert(call: TorchCall) -> Recognized:
    before, after = call.values[call.input], call.outputs[0]
    if before.dtype == after.dtype and len(call.operands) == 1:
        return Recognized("identity", {"input": call.input})
    return Recognized("elementwise", {}, torch.Tensor.to, (Ref(call.input), after.dtype), {})


def _expand(call: TorchCall) -> Recognized | None:
    if call.output == call.shape(call.input):
        return Recognized("identity", {"input": call.input}, torch.Tensor.clone, (Ref(call.input),), {})
    templates: list[Any] = [name for name in call.operands[1:] if call.shape(name) == call.output]
    if not templates:
        return None
    return Recognized("elementwise", {}, expand_like, (Ref(call.input), Ref(templates[0])), {})


def place(situation: Situation) -> Placed:
    """Operands broadcast as in torch; the result is split as the operand with the most elements is, and further where
    another operand already is."""
    call = situation.call
    output = call.outputs[0]
    out_shape = situation.shape(output)
    shapes = {name: _aligned(situation, name) for name in call.inputs}
    target = agreed(situation, out_shape, shapes)
    partial = _partial(situation)
    inputs = {name: operand(target, out_shape, shape, keep=partial) for name, shape in shapes.items()}
    return Placed(inputs, {output: Layout.of(target, partial=partial)})


def _aligned(situation: Situation, name: str) -> tuple[int, ...]:
    """A value's shape; a vector of one number per channel stands for [channels, 1, 1]."""
    shape = situation.shape(name)
    if name == situation.call.attributes.get("channel_operand"):
        return shape + (1,) * (len(situation.shape(situation.call.outputs[0])) - 2)
    return shape


def _partial(situation: Situation) -> frozenset[int]:
    """Axes over which the sum may wait: additions of terms that are all partial."""
    call = situation.call
    if getattr(call.function, "__name__", "") not in ("add", "sub") or len(call.args) < 2 or len(call.inputs) < 2:
        return frozenset()
    layouts = [situation.given.get(name, Layout()) for name in call.inputs]
    return frozenset.intersection(*(layout.partial for layout in layouts))


_KEEPS_OUTPUT = ("relu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt")
_KEEPS_NOTHING = ("add", "sub", "rsub", "neg", "to", "expand_like", "expand_as")
_KEEPS_OPERANDS = ("mul", "div")


def _keeps(call: Call, values: Mapping[str, Value]) -> Kept:
    function = getattr(call.function, "__name__", "").strip("_")
    if function in _KEEPS_OUTPUT:
        return ((name, 0) for name in call.outputs)
    if function in _KEEPS_NOTHING or (function in _KEEPS_OPERANDS and len(call.inputs) < 2):
        return ()
    return ((name, 0) for name in call.inputs)


OPERATIONS = (
    Operation(
        "elementwise",
        place,
        {
            **dict.fromkeys((*ACTIVATIONS, *ARITHMETIC, *OPERATORS), _elementwise),
            **dict.fromkeys(CONVERSIONS, _convert),
            **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
            "prelu": _prelu,
        },
        keeps=_keeps,
        follows=True,
        by_function=True,
        by_arguments=True,
    ),
)
