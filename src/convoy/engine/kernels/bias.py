"""The bias of a layer whose output is a partial sum: added once, by one rank of the group."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class AddBiasOnce(torch.autograd.Function):
    """Adds the bias where `first`; its gradient is computed everywhere, for the gradient of a partial sum is whole.

    Every rank of the group so gets the bias's whole gradient, and nothing has to be sent for it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, dim: int, first: bool) -> Tensor:
        """`x` [..., channels at `dim`, ...], `bias` [channels]; `x` may be of a lower precision, which stays."""
        ctx.dim, ctx.dtype = dim, bias.dtype
        shape = [1] * x.dim()
        shape[dim] = -1
        return x + bias.view(shape).to(x.dtype) if first else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The bias's gradient is the sum over all other dimensions."""
        others = [dim for dim in range(gradient.dim()) if dim != ctx.dim]
        return gradient, gradient.sum(others, dtype=ctx.dtype), None, None
