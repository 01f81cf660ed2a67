"""The last thing that a rank's output goes through."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """The tensor itself, with a gradient multiplied by `factor`.

    A rank's loss is the mean over its own n samples of N; times n / N, the ranks' gradients add up to that of the mean
    over all N, however unevenly they are divided.
    """
    return _ScaleGradient.apply(x, factor)  # type: ignore[no-any-return]


def writable(x: Tensor) -> Tensor:
    """The tensor itself, or a copy of a view: autograd does not let users change in place what a function of ours
    gives as a view, though they may with what a plain layer gives.
    """
    return x.clone() if x.requires_grad and x._is_view() else x
