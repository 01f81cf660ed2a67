"""Sums, means and maxima over dimensions, and softmax."""

import math

import torch
from torch import Tensor

from convoy.graph.graph import Recognized, TorchCall
from convoy.ops.kernel import Kernel, Site, as_called
from convoy.ops.layouts import Follow, by_dim
from convoy.ops.operation import Operation, keeps_output
from convoy.plans.layout import Split
from convoy.plans.place import Placed, Situation


def _reduce(call: TorchCall) -> Recognized | None:
    arguments = call.bound(input=None, dim=None, keepdim=False, dtype=None)
    dims, rank = arguments["dim"], len(call.shape(call.input))
    if arguments["dtype"] is not None or rank == 0:
        return None
    if call.values[call.input].dtype != call.outputs[0].dtype:
        return None
    if dims is None or dims in ((), []):
        dims = tuple(range(rank))
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    attributes = {"dims": tuple(sorted(dim % rank for dim in dims)), "keepdim": bool(arguments["keepdim"])}
    return Recognized("reduce", {"input": call.input, "function": call.name, **attributes})


def _softmax(call: TorchCall) -> Recognized | None:
    dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    if dim is None or call.values[call.input].dtype != call.outputs[0].dtype:
        return None
    return Recognized("softmax", {"input": call.input, "dim": dim % len(call.output), "function": call.name})


def place(situation: Situation) -> Placed:
    """Sums and means over a divided dimension are partial sums; a maximum needs it whole."""
    attributes = situation.call.attributes
    function, dims = attributes["function"], attributes["dims"]
    is_linear = function in ("mean", "sum")

    def follow(dim: int, split: Split) -> Follow:
        if dim in dims:
            return (split, None) if is_linear else f"{function} over a divided dimension: it is whole"
        return split, (dim if attributes["keepdim"] else dim - sum(d < dim for d in dims), split)

    return by_dim(situation, follow, is_linear)


def _place_softmax(situation: Situation) -> Placed:
    def follow(dim: int, split: Split) -> Follow:
        is_mixed = dim == situation.call.attributes["dim"]
        return "softmax over a divided dimension: it is whole" if is_mixed else (split, (dim, split))

    return by_dim(situation, follow)


def _build(site: Site) -> Kernel:
    """A mean over a divided dimension is the sum of the rank's part, divided by the number of all elements."""
    call = site.call
    source, function = call.attributes["input"], call.attributes["function"]
    shape, dims = site.graph.shape(source), call.attributes["dims"]
    if not any(dim in dims for dim, _ in site.layouts[source].splits):
        return as_called(site)
    assert function in ("mean", "sum"), function
    keepdim, count = call.attributes["keepdim"], math.prod(shape[dim] for dim in dims)

    def kernel(x: Tensor) -> list[Tensor]:
        if function == "sum":
            return [x.sum(dims, keepdim=keepdim)]
        return [(x.sum(dims, keepdim, dtype=torch.promote_types(x.dtype, torch.float32)) / count).to(x.dtype)]

    return kernel


OPERATIONS = (
    Operation(
        "reduce",
        place,
        dict.fromkeys(("mean", "sum", "amax"), _reduce),
        _build,
        by_function=True,
        options=("dims", "keepdim"),
    ),
    Operation(
        "softmax",
        _place_softmax,
        dict.fromkeys(("softmax", "log_softmax"), _softmax),
        keeps=keeps_output,
        follows=True,
        passes=1.0,
        by_function=True,
        options=("dim",),
        whole_precision=frozenset({"cuda"}),
    ),
)
