"""Softmax and log-softmax of a rank's part of the logits."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from convoy.comm.collectives import all_gather, all_reduce
from convoy.engine.kernels import as_called
from convoy.engine.kernels.kernel import Alone, Kernel, Site


def build(site: Site) -> Kernel:
    """The function itself, or where the classes are divided its sums over the ranks that divide them."""
    call = site.call
    source = call.attributes["input"]
    dim = call.attributes["dim"] % len(site.graph.shape(source))
    split = site.layouts[source].split(dim)
    group = site.groups.of(split.axes) if split else None
    if group is None:
        return as_called.build(site)
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
        highest = all_gather(highest, group).amax(0)
        wide = wide - highest
        total = all_reduce(wide.exp().sum(dim, keepdim=True), group)
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
