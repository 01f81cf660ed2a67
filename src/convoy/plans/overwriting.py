"""Which calls may overwrite an input: those whose input nobody else reads, in no backward pass either."""

from collections.abc import Callable, Container, Iterable
from functools import cached_property

from convoy.graph.graph import Call, Graph, Ref

_ADDITIONS = ("add", "__add__", "__iadd__", "__radd__")
_GIVE_THEIR_OWN = ("conv", "linear", "batch_norm", "cat")
"""Kinds of calls that give a tensor of their own, which their backward pass does not read."""


class Readers:
    """Who reads each value of a network.

    Args:
        graph: the network.
        outputs: names of the values that it returns.
    """

    def __init__(self, graph: Graph, outputs: Iterable[str]) -> None:
        self._graph = graph
        self._outputs = tuple(outputs)
        self._producers = {name: call for call in graph.calls for name in call.outputs}

    @cached_property
    def _numbers(self) -> dict[str, int]:
        found = {name: len(calls) for name, calls in self._graph.consumers().items()}
        for name in self._outputs:
            found[name] += 1
        return found

    def is_spare(self, name: str, transferred: Container[str]) -> bool:
        """Whether the only call that takes a value may overwrite it; `transferred` come to it from other ranks."""
        producer = self._producers.get(name)
        if producer is None or name in transferred or self._numbers[name] != 1:
            return False
        return producer.op in _GIVE_THEIR_OWN or _is_sum(producer)


def overwritten(call: Call, is_spare: Callable[[str], bool]) -> str | None:
    """The input that a call writes its result over, or None where it takes memory of its own."""
    name = getattr(call.function, "__name__", "")
    if call.op != "elementwise" or not call.inputs or set(call.kwargs) - {"inplace"}:
        return None
    if name == "relu" and call.args == (Ref(call.inputs[0]),):
        return call.inputs[0] if is_spare(call.inputs[0]) else None
    terms = tuple(map(Ref, call.inputs))
    if name in _ADDITIONS and len(terms) == 2 and set(call.args) == set(terms) and not call.kwargs:
        return next((source for source in call.inputs if is_spare(source)), None)
    return None


def _is_sum(call: Call) -> bool:
    return call.op == "elementwise" and getattr(call.function, "__name__", "") in _ADDITIONS
