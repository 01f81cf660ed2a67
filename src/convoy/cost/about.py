"""What is true of a graph however it is placed, found out once."""

import weakref
from dataclasses import dataclass

import torch

from convoy.graph.graph import Graph, Ref
from convoy.graph.tree import leaves
from convoy.plans.overwriting import Readers
from convoy.plans.traffic import needs_gradient


@dataclass(frozen=True)
class About:
    """Of a graph.

    Attributes:
        differentiable: values that have gradients.
        spare: values that the only call that takes them may overwrite, unless they come from other ranks.
    """

    differentiable: frozenset[str]
    spare: frozenset[str]

    @staticmethod
    def of(graph: Graph) -> "About":
        """Found out by looking at all calls."""
        readers = Readers(graph, [ref.name for ref in leaves(graph.output, Ref)])
        spare = frozenset(name for name in graph.values if readers.is_spare(name, ()))
        return About(needs_gradient(graph), spare)


_known: dict[int, tuple["weakref.ref[Graph]", About]] = {}


def about(graph: Graph) -> About:
    """The same graph is looked at once."""
    found = _known.get(id(graph))
    if found is None or found[0]() is not graph:
        number = id(graph)
        found = _known[number] = (weakref.ref(graph, lambda _: _known.pop(number, None)), About.of(graph))
    return found[1]


def dtype_name(dtype: torch.dtype) -> str:
    """As pieces write a type: `float32`."""
    return str(dtype).removeprefix("torch.")
