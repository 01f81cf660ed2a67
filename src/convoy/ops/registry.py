"""Every operation there is, and what they do together: a network is captured and placed on a mesh, one call after the
other, and results have types under `torch.autocast`. A new operation is a part of the file of its family, or a file of
this folder and a name in `_FILES`.

Autocast has convolutions and matrix products compute in a lower precision; later calls take the type of their inputs,
except those that autocast keeps in float32 (https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference).
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import prod

import torch

from convoy.graph.capture import capture as capture_by
from convoy.graph.graph import Call, Graph, Recognized, Ref, TorchCall, Value
from convoy.ops import (
    batch_norm,
    convolution,
    elementwise,
    norms,
    opaque,
    pool,
    random,
    reduce,
    shape,
    slices,
)
from convoy.ops.layouts import axes_along
from convoy.ops.operation import Operation
from convoy.plans.layout import WHOLE, Layout
from convoy.plans.mesh import Axes
from convoy.plans.place import COMPUTE, Batch, Placed, PlacedCall, Placement, Situation, own_samples
from convoy.plans.plan import Plan
from convoy.plans.transfer import transfer

_FILES = (batch_norm, slices, convolution, elementwise, norms, opaque, pool, random, reduce, shape)

OPERATIONS: dict[str, Operation] = {operation.name: operation for file in _FILES for operation in file.OPERATIONS}
_RECOGNIZERS = {name: find for operation in OPERATIONS.values() for name, find in operation.functions.items()}
assert len(_RECOGNIZERS) == sum(len(operation.functions) for operation in OPERATIONS.values()), "two know one function"


def recognize(call: TorchCall) -> Recognized:
    """The operation and the attributes of a call; `opaque` where no operation knows it. Tensors by keyword are recorded
    in the order of the attributes, which is that of the function's parameters: costs tell operands apart by it."""
    recognizer = _RECOGNIZERS.get(call.name)
    recognized = (recognizer(call) if recognizer else None) or Recognized("opaque")
    tensors = [name for name in recognized.attributes if isinstance(call.kwargs.get(name), Ref)]
    if recognized.kwargs is not None or tensors == [name for name in call.kwargs if name in tensors]:
        return recognized  # runs of before compare their calls' arguments as they are written
    return replace(recognized, kwargs={name: call.kwargs[name] for name in tensors} | call.kwargs)


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


# `convoy.graph.capture` with the operations of Convoy: `capture(model, inputs, training=None, ...)`. Operations need
# layouts, halos and collectives, which are above `graph` and `plans`. So `graph.capture` takes the function that
# recognizes calls: a registry filled by imports would hang on their order.
capture = partial(capture_by, recognize)


def place(
    graph: Graph,
    plan: Plan,
    batch: Batch,
    outputs: Iterable[str],
    kept: Callable[[str], Layout | None] = lambda name: None,
) -> Placement:
    """Put a network, captured at its whole batch, on the mesh as a plan says: the layout of every tensor, and what is
    sent between calls. `outputs` are the values that it returns; `kept` gives the layout that a parameter or buffer
    already has, None to put it where its first call wants it. A layer that cannot be divided so raises a
    ConvoyError."""
    mesh = plan.mesh
    sample_split = batch.split(batch.axes)
    of_batch = Layout.of({0: sample_split}) if sample_split else WHOLE
    layouts: dict[str, Layout] = {}
    for name in graph.inputs:
        shape = graph.shape(name)
        layouts[name] = of_batch if shape and shape[0] == batch.num_samples else WHOLE
    calls = []
    for call in graph.calls:
        strategy = plan.strategy(call.layer, call.op)
        input_layouts = {name: layouts[name] for name in call.inputs if graph.values[name].origin in ("call", "input")}
        note = ""
        if call.op in COMPUTE and plan.pattern(call.layer) == "*":  # of which nobody has said so by name
            wanted, strategy = strategy, convolution.undivided(graph, batch, call, strategy)
            note = "a single channel is not divided" if strategy != wanted else ""
        placed = OPERATIONS[call.op].place(Situation(graph, mesh, batch, call, strategy, input_layouts))
        placed = replace(placed, note=note) if note else placed
        steps = {}
        for name, target in placed.inputs.items():
            if name not in layouts:
                layout = kept(name)
                layouts[name] = target if layout is None else layout
            if layouts[name] != target:
                steps[name] = transfer(layouts[name], target, mesh, graph.shape(name))
        layouts |= placed.outputs
        calls.append(PlacedCall(call, strategy, placed, steps))
    names = list(outputs)
    for name in names:
        layouts.setdefault(name, kept(name) or WHOLE)
    targets = {name: own_samples(graph.shape(name), batch) for name in names}
    last = {name: transfer(layouts[name], target, mesh, graph.shape(name)) for name, target in targets.items()}
    return Placement(graph, mesh, batch, tuple(calls), layouts, last, targets)


def sharing_axes(call: Call, placed: Placed, graph: Graph) -> Axes:
    """The axes over which ranks exchange statistics inside a call, because they hold parts of what it normalizes."""
    dims = OPERATIONS[call.op].shared_dims
    if dims is None:
        return ()
    layout = placed.inputs[call.attributes["input"]]
    return axes_along(layout, dims(call, graph, layout))


def work(graph: Graph) -> list[float]:
    """How long each call takes, roughly and in no unit: multiply-adds, and the cost of writing the outputs."""
    durations = []
    for call in graph.calls:
        operation = OPERATIONS[call.op]
        num_written = 0 if operation.is_view else sum(prod(graph.shape(name)) for name in call.outputs)
        count = 0
        if operation.multiplications is not None and len(call.inputs) > 1:
            shapes, output = [graph.shape(name) for name in call.inputs], graph.shape(call.outputs[0])
            count = operation.multiplications(shapes, output, bool(call.attributes.get("transposed")))
        durations.append(float(count + _WRITING * num_written))
    return durations


_WRITING = 16  # multiply-adds of a convolution in the time in which a number is written and read again
