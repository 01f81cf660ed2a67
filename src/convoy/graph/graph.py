"""What a network computes, as a list of calls on named values: nothing here knows of devices."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

Origin = Literal["input", "parameter", "buffer", "constant", "call"]


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor in the arguments and outputs of a call."""

    name: str


@dataclass(frozen=True)
class Value:
    """A tensor of the graph.

    Attributes:
        name: the serial name of a parameter or buffer; otherwise a name of its own.
        shape: the whole tensor's, over the global batch.
        origin: where it comes from; `call` for the result of a call.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: Origin = "call"


@dataclass(frozen=True)
class Call:
    """One call of a torch function.

    Attributes:
        name: unique in the graph: the layer's name, numbered where a layer makes several calls.
        layer: qualified name of the innermost module that makes the call; patterns of a plan match it.
        op: kind of work, one of `convoy.graph.OPS`; `opaque` where nobody has a rule.
        function: what was called.
        args, kwargs: its arguments, with a `Ref` for every tensor.
        inputs: names of the tensors among the arguments, in order, each once.
        outputs: names of the tensors that it returns.
        structure: the result with a `Ref` for every tensor.
        attributes: the arguments that matter to the rules, under names of their own for each `op`.
    """

    name: str
    layer: str
    op: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    structure: Any
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Graph:
    """A network at one batch size, image size and mode.

    Attributes:
        calls: in the order in which they run.
        values: every tensor, by name.
        inputs: names of the network's tensor arguments.
        output: what the network returns, with a `Ref` for every tensor.
        constants: tensors that are neither parameters nor buffers, by name.
        training: the mode in which it was captured.
        recomputed: layers that ask autograd to keep something else than usual, as activation checkpointing does: the
            graph does not say what.
    """

    calls: tuple[Call, ...]
    values: dict[str, Value]
    inputs: tuple[str, ...]
    output: Any
    constants: dict[str, torch.Tensor]
    training: bool
    recomputed: tuple[str, ...] = ()

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a value."""
        return self.values[name].shape

    def parameters(self) -> Iterator[Value]:
        """Values that are parameters, in order of first use."""
        return (value for value in self.values.values() if value.origin == "parameter")

    def consumers(self) -> dict[str, list[Call]]:
        """For every value, the calls that take it."""
        found: dict[str, list[Call]] = {name: [] for name in self.values}
        for call in self.calls:
            for name in call.inputs:
                found[name].append(call)
        return found

    def borrowed(self) -> Iterator[tuple[str, str]]:
        """Modules of whose parameters a call of another module makes use, with the name of that one."""
        for call in self.calls:
            for name in call.inputs:
                owner = name.rpartition(".")[0]
                if self.values[name].origin == "parameter" and owner != call.layer:
                    yield owner, call.layer

    def prefixed(self, prefix: str) -> "Graph":
        """The same graph as that of a part of a larger network, whose layers' names begin with `prefix`."""
        calls = (
            replace(call, name=f"{prefix}#{number}" if number else prefix, layer=_join(prefix, call.layer))
            for number, call in enumerate(self.calls)
        )
        return replace(self, calls=tuple(calls), recomputed=tuple(_join(prefix, name) for name in self.recomputed))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if name else prefix
