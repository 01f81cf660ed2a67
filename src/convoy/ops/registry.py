"""Every operation there is, and the types of their results under `torch.autocast`. A new one is a file of this folder,
and a line here.

Autocast has convolutions and matrix products compute in a lower precision; later calls take the type of their inputs,
except those that autocast keeps in float32 (https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference).
"""

from dataclasses import replace

import torch

from convoy.graph.graph import Call, Graph, Recognized, TorchCall, Value
from convoy.ops import (
    batch_norm,
    convolution,
    elementwise,
    interpolate,
    linear,
    lrn,
    norms,
    opaque,
    pad,
    pool,
    random,
    reduce,
    shape,
    slices,
)
from convoy.ops.operation import Operation

_FILES = (
    *(batch_norm, slices, convolution, elementwise, norms, interpolate, linear, lrn, opaque),
    *(pad, pool, random, reduce, shape),
)

OPERATIONS: dict[str, Operation] = {operation.name: operation for file in _FILES for operation in file.OPERATIONS}
_RECOGNIZERS = {name: find for operation in OPERATIONS.values() for name, find in operation.functions.items()}
assert len(_RECOGNIZERS) == sum(len(operation.functions) for operation in OPERATIONS.values()), "two know one function"


def recognize(call: TorchCall) -> Recognized:
    """The operation and the attributes of a call; `opaque` where no operation knows it."""
    recognizer = _RECOGNIZERS.get(call.name)
    return (recognizer(call) if recognizer else None) or Recognized("opaque")


_WHOLE_FUNCTIONS = {
    "cpu": frozenset[str](),
    "cuda": frozenset(
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus sum prod "  # noqa: SIM905
        "cumsum".split()
    ),
}


def under_autocast(graph: Graph, precision: torch.dtype | None, device: str) -> Graph:
    """A graph captured without autocast, with the types that its values have while autocast computes in `precision`
    (None where it is off) on a type of `device` such as `cuda`; types other than float32 stay as they are."""
    if precision is None:
        return graph
    values = dict(graph.values)
    for call in graph.calls:
        for name in call.outputs:
            if values[name].dtype == torch.float32:
                values[name] = replace(values[name], dtype=_computes(call, values, precision, device))
    return replace(graph, values=values)


def _computes(call: Call, values: dict[str, Value], precision: torch.dtype, device: str) -> torch.dtype:
    operation = OPERATIONS[call.op]
    if operation.is_lowered:
        return precision
    function = getattr(call.function, "__name__", "").strip("_")
    if device in operation.whole_precision or function in (*_WHOLE_FUNCTIONS.get(device, ()), "to", "float"):
        return torch.float32
    dtypes = [values[name].dtype for name in call.inputs if values[name].origin in ("call", "input", "constant")]
    if call.op == "batch_norm":  # its weights are float32 whatever it computes
        dtypes = dtypes[:1]
    float_dtypes = [dtype for dtype in dtypes if dtype.is_floating_point]
    return torch.float32 if not float_dtypes or torch.float32 in float_dtypes else precision
