"""Every operation there is. A new one is a file of this folder, and a line here."""

from convoy.graph.torch_call import Recognized, TorchCall
from convoy.ops import (
    batch_norm,
    concatenate,
    convolution,
    elementwise,
    group_norm,
    interpolate,
    layer_norm,
    linear,
    lrn,
    opaque,
    pad,
    pool,
    random,
    reduce,
    rms_norm,
    shape,
    slices,
    softmax,
)
from convoy.ops.operation import Operation

_FILES = (
    *(batch_norm, concatenate, convolution, elementwise, group_norm, interpolate, layer_norm, linear, lrn, opaque),
    *(pad, pool, random, reduce, rms_norm, shape, slices, softmax),
)

OPERATIONS: dict[str, Operation] = {operation.name: operation for file in _FILES for operation in file.OPERATIONS}
_RECOGNIZERS = {name: find for operation in OPERATIONS.values() for name, find in operation.functions.items()}


def recognize(call: TorchCall) -> Recognized:
    """The operation and the attributes of a call; `opaque` where no operation knows it."""
    recognizer = _RECOGNIZERS.get(call.name)
    return (recognizer(call) if recognizer else None) or Recognized("opaque")
