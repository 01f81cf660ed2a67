"""Runs a graph on real tensors, call by call: what it gives must be what the network gives."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from convoy.graph import tree
from convoy.graph.graph import Graph, Ref


def replay(graph: Graph, model: nn.Module, inputs: Sequence[Tensor]) -> Any:
    """The network's output; every shape and type on the way is checked against the graph."""
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.constants}
    tensors.update(zip(graph.inputs, inputs, strict=True))
    for call in graph.calls:
        args, kwargs = tree.replace((call.args, call.kwargs), Ref, lambda ref: tensors[ref.name])
        outputs = tree.leaves(call.function(*args, **kwargs), Tensor)
        for name, tensor in zip(call.outputs, outputs, strict=True):
            value = graph.values[name]
            assert (tuple(tensor.shape), tensor.dtype) == (value.shape, value.dtype), call
            tensors[name] = tensor
    return tree.replace(graph.output, Ref, lambda ref: tensors[ref.name])


def same(one: Any, other: Any) -> bool:
    """Whether two outputs hold the same tensors, bit by bit, in containers of the same kind."""
    firsts, seconds = tree.leaves(one, Tensor), tree.leaves(other, Tensor)
    return (
        type(one) is type(other)
        and len(firsts) == len(seconds) > 0
        and all(torch.equal(a, b) for a, b in zip(firsts, seconds, strict=True))
    )
