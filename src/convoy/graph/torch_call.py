"""A call of a torch function before it is known which operation it is, and what an operation makes of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from convoy.graph.graph import Ref, Value


@dataclass(frozen=True)
class TorchCall:
    """A call of a torch function.

    Attributes:
        function: what was called.
        args, kwargs: with a `Ref` for every tensor.
        values: the tensors so far, by name.
        outputs: the tensors that it gives.
        module: the innermost module that runs.
        updates: counters of batches that were raised and not used yet.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: Mapping[str, Value]
    outputs: tuple[Value, ...]
    module: nn.Module
    updates: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The function's bare name: `relu` for `torch.relu` and `F.relu`, `add` for `Tensor.__add__`."""
        return str(getattr(self.function, "__name__", "")).strip("_")

    def bound(self, **defaults: Any) -> dict[str, Any]:
        """The arguments by name; `defaults` are the function's parameters in order, with the names for tensors."""
        found = dict(defaults)
        found.update(zip(defaults, self.args, strict=False))
        found.update({name: value for name, value in self.kwargs.items() if name in defaults})
        return {name: value.name if isinstance(value, Ref) else value for name, value in found.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor among the arguments."""
        return self.values[name].shape

    @property
    def input(self) -> str:
        """The first argument, which is a tensor."""
        first = self.args[0] if self.args else self.kwargs.get("input", self.kwargs.get("self"))
        assert isinstance(first, Ref), f"{self.name} takes no tensor first"
        return first.name

    @property
    def operands(self) -> list[str]:
        """The tensors among the arguments themselves, not those in lists."""
        return [value.name for value in (*self.args, *self.kwargs.values()) if isinstance(value, Ref)]

    @property
    def output(self) -> tuple[int, ...]:
        """Shape of the (first) result."""
        return self.outputs[0].shape


@dataclass(frozen=True)
class Recognized:
    """What an operation makes of a call.

    Attributes:
        op: name of the operation.
        attributes: the arguments that matter to it, under names of its own.
        function, args, kwargs: what to record in place of what was called; None leaves it.
        updates: whether it changes buffers, so that it runs also where nobody takes its result.
        draws: whether it draws random numbers, and knows for which samples.
    """

    op: str
    attributes: dict[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    updates: bool = False
    draws: bool = False


Recognizer = Callable[[TorchCall], Recognized | None]
"""What one operation makes of a call; None where it does not know it."""
Recognize = Callable[[TorchCall], Recognized]
"""What all operations together make of a call."""


def each(value: Any, count: int) -> tuple[int, ...]:
    """One number for each of `count` dimensions."""
    if isinstance(value, int):
        return (value,) * count
    numbers = tuple(int(item) for item in value)
    return numbers * count if len(numbers) == 1 else numbers


def flat(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """`(1, 2)` for the arguments `1, 2` as well as for the one argument `(1, 2)`."""
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else tuple(sizes)
