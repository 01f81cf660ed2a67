"""Softmax and log-softmax."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from convoy.comm.collectives import all_gather, all_reduce
from convoy.graph.graph import Call, Graph, Recognized, TorchCall
from convoy.ops.context import exchanged
from convoy.ops.kernel import Alone, Kernel, Site, as_called
from convoy.ops.layouts import resolved
from convoy.ops.operation import Operation, keeps_output
from convoy.plans.layout import Layout
from convoy.plans.place import Placed, Situation


def _softmax(call: TorchCall) -> Recognized | None:
    dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    if dim is None or call.values[call.input].dtype != call.outputs[0].dtype:
        return None
    return Recognized("softmax", {"input": call.input, "dim": dim % len(call.output), "function": call.name})


def place(situation: Situation) -> Placed:
    """Where the classes are divided, the call adds up the sums of exponentials and never gathers the logits."""
    call = situation.call
    source = call.attributes["input"]
    layout = resolved(situation, source)
    return Placed({source: layout}, {call.outputs[0]: layout})


def _build(site: Site) -> Kernel:
    """The function itself, or where the classes are divided its sums over the ranks that divide them."""
    call = site.call
    dim = call.attributes["dim"]
    split = site.layouts[call.attributes["input"]].split(dim)
    group = site.groups.of(split.axes) if split else None
    if group is None:
        return as_called(site)
    logarithm = call.attributes["function"] == "log_softmax"
    dtype = call.kwargs.get("dtype")

    def kernel(x: Tensor) -> list[Tensor]:
        return [_Softmax.apply(x if dtype is None else x.to(dtype), dim, logarithm, group)]

    return Alone(kernel)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, logarithm: bool, group: ProcessGroup) -> Tensor:
        wide = x.double() if x.dtype == torch.float64 else x.float()
        shape = list(wide.shape)
        shape[dim] = 1
        highest = wide.amax(dim, keepdim=True) if wide.shape[dim] else wide.new_full(shape, -torch.inf)
        highest = exchanged(all_gather, highest, group).amax(0)
        wide = wide - highest
        total = exchanged(all_reduce, wide.exp().sum(dim, keepdim=True), group)
        y = (wide - total.log() if logarithm else wide.exp() / total).to(x.dtype)
        ctx.save_for_backward(y)
        ctx.dim, ctx.logarithm, ctx.group = dim, logarithm, group
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        if ctx.logarithm:
            total = all_reduce(gradient.sum(ctx.dim, keepdim=True), ctx.group)
            return gradient - y.exp() * total, None, None, None
        total = all_reduce((gradient * y).sum(ctx.dim, keepdim=True), ctx.group)
        return y * (gradient - total), None, None, None


def _shared_dims(call: Call, graph: Graph, layout: Layout) -> set[int]:
    return {call.attributes["dim"]}


OPERATIONS = (
    Operation(
        "softmax",
        place,
        dict.fromkeys(("softmax", "log_softmax"), _softmax),
        _build,
        keeps=keeps_output,
        follows=True,
        passes=1.0,
        by_function=True,
        options=("dim",),
        shared_dims=_shared_dims,
        statistics=lambda call, shape: math.prod(shape) // max(1, shape[call.attributes["dim"]]),
        sums_in_forward=True,
        whole_precision=frozenset({"cuda"}),
    ),
)
