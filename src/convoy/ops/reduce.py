"""Sums, means and maxima over dimensions."""

import math

from torch import Tensor

from convoy.graph.graph import Recognized, TorchCall
from convoy.ops.kernel import Kernel, Site, as_called
from convoy.ops.layouts import Follow, by_dim
from convoy.ops.operation import Operation
from convoy.plans.layout import Split
from convoy.plans.place import Placed, Situation


def _reduce(call: TorchCall) -> Recognized | None:
    arguments = call.bound(input=None, dim=None, keepdim=False, dtype=None)
    dims = call.kwargs.get("axis", arguments["dim"])
    rank = len(call.shape(call.input))
    if arguments["dtype"] is not None or rank == 0 or "keepdims" in call.kwargs:
        return None
    if call.values[call.input].dtype != call.outputs[0].dtype:
        return None
    if dims is None or dims in ((), []):
        dims = tuple(range(rank))
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    return Recognized(
        "reduce",
        {
            "input": call.input,
            "function": call.name,
            "dims": tuple(sorted(dim % rank for dim in dims)),
            "keepdim": bool(arguments["keepdim"]),
        },
    )


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


def _build(site: Site) -> Kernel:
    """A mean over a divided dimension is the sum of the rank's part, divided by the number of all elements."""
    call = site.call
    source, function = call.attributes["input"], call.attributes["function"]
    shape, dims = site.graph.shape(source), call.attributes["dims"]
    if not any(dim in dims for dim, _ in site.layouts[source].splits):
        return as_called(site)
    assert function in ("mean", "sum"), function
    keepdim, dtype = call.attributes["keepdim"], call.kwargs.get("dtype")
    count = math.prod(shape[dim] for dim in dims)

    def kernel(x: Tensor) -> list[Tensor]:
        total = x.sum(dims, keepdim=keepdim, dtype=dtype)
        return [total if function == "sum" else (total / count).to(dtype or x.dtype)]

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
)
