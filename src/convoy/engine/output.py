"""The last thing that a rank's output goes through, its loss, and the first that its inputs do."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from convoy.errors import ConvoyError
from convoy.units import shorten


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
    """The tensor itself, with a gradient multiplied by `factor`. A rank's loss is the mean over its own n samples of N;
    times n / N, the ranks' gradients add up to that of the mean over all N, however unevenly they are divided."""
    return _ScaleGradient.apply(x, factor)  # type: ignore[no-any-return]


class _UndoScale(_ScaleGradient):
    """The inverse, which `gradient_scale` does not take for a network's output."""


def undo_scale(x: Tensor, factor: float) -> Tensor:
    """The tensor itself, with a gradient divided by `factor` if the output of a network on several ranks went into it.
    One network's output may be another's input. The gradient that comes back there has been multiplied by the rank's
    share of the samples at the second one's output, and would be again at that of the first."""
    if x.grad_fn is None or factor == 0 or not any(gradient_scale(node) is not None for node in graph_of([x.grad_fn])):
        return x
    return _UndoScale.apply(x, 1 / factor)  # type: ignore[no-any-return]


def graph_of(roots: Sequence[Node]) -> list[Node]:
    """The nodes of autograd's graph from `roots` to the outputs of networks on several ranks."""
    nodes = dict.fromkeys(roots)
    queue = list(roots)
    while queue:
        node = queue.pop()
        if gradient_scale(node) is not None:
            continue
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in nodes:
                nodes[next_node] = None
                queue.append(next_node)
    return list(nodes)


def gradient_scale(node: Node) -> float | None:
    """The factor, where a node of autograd's graph is that of `scale_gradient`; None for any other."""
    is_scale = getattr(type(node), "_forward_cls", None) is _ScaleGradient
    return node.factor if is_scale else None  # type: ignore[attr-defined]


def differentiable_loss(loss: Any, kind: str) -> Tensor:
    """The result of a user's loss function, if a backward pass can begin at it; ConvoyError otherwise. `kind` is `mean`
    or `part`, as `convoy.parallelize` takes it."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        loss_text = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ConvoyError(
            f"the loss function given to convoy.forward_backward returned {shorten(loss_text, 80)}: let it return a "
            f"scalar, {'the mean' if kind == 'mean' else 'a sum'} over the samples that it is given"
        )
    if not loss.requires_grad or not loss.is_floating_point():
        loss_text = f"{str(loss.dtype).removeprefix('torch.')} with{'' if loss.requires_grad else 'out'} a gradient"
        raise ConvoyError(
            f"the loss function given to convoy.forward_backward returned {loss_text}: let it return a real number, "
            "computed from what the network gives by operations that torch differentiates"
        )
    return loss.reshape(())
