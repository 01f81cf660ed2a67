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
        adding: calls with those of their inputs whose gradients they add to that of a later call: the backward pass
            comes to the later one first.
        spare: values that the only call that takes them may overwrite, unless they come from other ranks.
    """

    differentiable: frozenset[str]
    adding: dict[str, frozenset[str]]
    spare: frozenset[str]

    @staticmethod
    def of(graph: Graph) -> "About":
        """Found out by looking at all calls."""
        readers = Readers(graph, [ref.name for ref in leaves(graph.output, Ref)])
        spare = frozenset(name for name in graph.values if readers.is_spare(name, ()))
        differentiable = needs_gradient(graph)
        return About(differentiable, _adding(graph, differentiable), spare)


def _adding(graph: Graph, differentiable: frozenset[str]) -> dict[str, frozenset[str]]:
    seen: set[str] = set()
    found = {}
    for call in reversed(graph.calls):
        taken = differentiable.intersection(call.inputs) if differentiable.intersection(call.outputs) else frozenset()
        found[call.name] = frozenset(taken & seen)
        seen |= taken
    return found


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
