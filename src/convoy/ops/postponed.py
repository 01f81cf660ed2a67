"""Weight gradients that are computed later than those of activations, for which other stages wait.

For the gradient of its weight, a convolution or linear layer needs its input and its output's gradient. Zero-bubble
schedules (Qi et al., "Zero Bubble Pipeline Parallelism", 2024) keep both and go on with the backward pass. Gradients of
several parts of a batch are computed at once, so that each weight and its gradient are read and written once, which is
most of the work for small parts of a batch in layers with many weights.

Autograd could compute a part of any graph later, but keeps the whole graph of every part for it, and computes each
part's gradients by themselves. A weight that is computed (a parametrization, a redistribution) keeps its gradient where
it is: its own backward pass would run twice.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from convoy.graph.graph import Graph
from convoy.plans.place import COMPUTE, PlacedCall


def postpones(placed: PlacedCall, graph: Graph) -> bool:
    """Whether a call's weight gradient can be postponed: the weight is a trained parameter, kept as it is used."""
    if placed.call.op not in COMPUTE:
        return False
    weight, bias = placed.call.attributes["weight"], placed.call.attributes["bias"]
    is_kept = graph.values[weight].origin == "parameter" and weight not in placed.transfers
    return is_kept and weight in graph.differentiable and (bias is None or bias in graph.differentiable)


def postponed_part(placed: PlacedCall, graph: Graph) -> float:
    """The part of a call's time in the backward pass that zero-bubble postpones: about half, or all where its input has
    no gradient."""
    if not postpones(placed, graph):
        return 0.0
    return 0.5 if placed.call.attributes["input"] in graph.differentiable else 1.0


def joins(numbers: float, weight: int) -> bool:
    """Whether a weight's gradients of several parts of a batch are computed in one call, which copies all that they are
    computed from, and not one after the other and added up: by the numbers of the weight, and those of a part's input
    and of its output's gradient."""
    return numbers <= weight


@dataclass(frozen=True)
class Weighted:
    """A function of an input that is linear in a weight, and its gradients, each by itself."""

    # from (input, weight, bias or None), with samples along dim 0 of input and output
    compute: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    input_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]  # from (gradient of the output, input, weight)
    # of weight and bias, from (gradient of the output, input, weight, whether there is a bias)
    weight_gradients: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class _Kept:
    """The tensors from which the weight gradients of one call and one part of a batch are computed."""

    layer: Weighted
    weight: Tensor
    bias: Tensor | None
    x: Tensor
    gradient: Tensor


class PostponedGradients:
    """The weight gradients of an update that are still to be computed, of one part of the batch after the other."""

    def __init__(self) -> None:
        self._parts: deque[dict[str, _Kept]] = deque()
        self._first = 0  # the part that comes first in there
        self._anchors: dict[torch.device, Tensor] = {}

    def begin_part(self) -> None:
        """Begin the forward pass of the next part."""
        self._parts.append({})

    def forward(self, call: str, layer: Weighted, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output of a layer for the part that goes forward now; its backward pass leaves out weight and bias."""
        kind = x.device.type
        is_lowered = torch.is_autocast_enabled(kind) and x.dtype != torch.float64  # which autocast leaves as it is
        dtype = torch.get_autocast_dtype(kind) if is_lowered else x.dtype
        x, part = x.to(dtype), self._parts[-1]

        def keep(x: Tensor, gradient: Tensor) -> None:
            part[call] = _Kept(layer, weight, bias, x, gradient)

        # within a tuple, so that autograd does not see that they are inputs
        y: Tensor = _InputGradient.apply(x, self._anchor(x.device), (layer, weight, bias), keep)
        return y

    def compute(self, last: int) -> list[Tensor]:
        """Compute the missing gradients of all parts up to `last`; the result is their weights and biases. This is a
        backward pass of its own, in which gradients become ready one after the other, last layer first."""
        calls: dict[str, list[_Kept]] = {}
        for _ in range(last + 1 - self._first):
            part = self._parts.popleft()
            for name in list(part):  # it is to keep nothing: outputs of the network that somebody keeps refer to it
                calls.setdefault(name, []).append(part.pop(name))
        self._first = last + 1
        parameters = [
            parameter
            for (first, *_) in calls.values()
            for parameter in (first.weight, first.bias)
            if parameter is not None
        ]
        chain = self._anchor(parameters[0].device) if parameters else None
        for name in reversed(list(calls)):  # in the order of the forward pass, as the chain is gone through backward
            parts = calls.pop(name)
            chain = _WeightGradients.apply(chain, parts[0].weight, parts[0].bias, parts)
        if chain is not None:
            chain.backward()
        return parameters

    def _anchor(self, device: torch.device) -> Tensor:
        """A tensor with a gradient, so that backward passes reach what depends on it; one for each device, as autograd
        has a thread and streams for each."""
        if device not in self._anchors:
            self._anchors[device] = torch.zeros((), requires_grad=True, device=device)
        return self._anchors[device]


class _InputGradient(torch.autograd.Function):
    """A layer whose backward pass gives its input's gradient alone, and keeps what the gradients of its weights
    need."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, weighted: Any, keep: Callable[[Tensor, Tensor], None]) -> Tensor:
        layer, weight, bias = weighted
        ctx.layer, ctx.keep = layer, keep
        weight = weight.detach().to(x.dtype)
        ctx.save_for_backward(x, weight)
        y: Tensor = layer.compute(x, weight, None if bias is None else bias.detach().to(x.dtype))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.keep(x, gradient)
        return ctx.layer.input_gradient(gradient, x, weight) if ctx.needs_input_grad[0] else None, None, None, None


class _WeightGradients(torch.autograd.Function):
    """A link in a chain: its backward pass gives a weight and a bias the gradients of several parts of a batch."""

    @staticmethod
    def forward(ctx: Any, chain: Tensor, weight: Tensor, bias: Tensor | None, parts: list[_Kept]) -> Tensor:
        ctx.parts = parts
        return chain.view_as(chain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_weight, of_bias = _summed(ctx.parts)
        ctx.parts = None
        return gradient, of_weight, of_bias, None


def _summed(parts: Sequence[_Kept]) -> tuple[Tensor, Tensor | None]:
    """The gradients of a weight and a bias, in their precision: that of the layer is too low to add parts up in."""
    first = parts[0]
    weight = first.weight.detach().to(first.x.dtype)

    def of(x: Tensor, gradient: Tensor) -> list[Tensor]:
        gradients = first.layer.weight_gradients(gradient, x, weight, first.bias is not None)
        return [gradient.to(first.weight.dtype) for gradient in gradients if gradient is not None]

    numbers = sum(part.x.numel() + part.gradient.numel() for part in parts)
    if len(parts) > 1 and joins(numbers / len(parts), weight.numel()):
        total = of(torch.cat([part.x for part in parts]), torch.cat([part.gradient for part in parts]))
    else:
        total = of(first.x, first.gradient)
        for part in parts[1:]:
            for sum_so_far, gradient_of_part in zip(total, of(part.x, part.gradient), strict=True):
                sum_so_far += gradient_of_part
    return total[0], total[1] if first.bias is not None else None
