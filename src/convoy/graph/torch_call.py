"""A call of a torch function before it is known which operation it is, and what an operation makes of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from convoy.graph.graph import Ref, Value


@dataclass(frozen=True)
class TorchCall:
    """A call of a torch function; `args` and `kwargs` have a `Ref` for every tensor."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: Mapping[str, Value]  # the tensors so far, by name
    outputs: tuple[Value, ...]  # the tensors that it gives
    module: nn.Module  # the innermost module that runs
    updates: tuple[str, ...] = ()  # counters of batches that were raised and not used yet

    @property
    def name(self) -> str:
        """The function's bare name: `relu` for `torch.relu` and `F.relu`, `add` for `Tensor.__add__`."""
        return str(getattr(self.function, "__name__", "")).strip("_")

    def bound(self, **defaults: Any) -> dict[str, Any]:
        """The arguments by name; `defaults` are the function's parameters in order, with the names for tensors."""
        arguments = dict(defaults)
        arguments.update(zip(defaults, self.args, strict=False))
        arguments.update({name: value for name, value in self.kwargs.items() if name in defaults})
        return {name: value.name if isinstance(value, Ref) else value for name, value in arguments.items()}

    def shape(self, name: str) -> tuple[int, ...]:
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
    """What an operation makes of a call; `function`, `args` and `kwargs`, unless None, are recorded in its place."""

    op: str
    attributes: dict[str, Any] = field(default_factory=dict)  # the operation's arguments, under its names
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    updates: bool = False  # it changes buffers, so it runs even where nobody takes its result
    draws: bool = False  # it draws random numbers, and knows for which samples


Recognizer = Callable[[TorchCall], Recognized | None]  # by one operation; None where it does not know the call
Recognize = Callable[[TorchCall], Recognized]  # by all operations together


def each(value: Any, count: int) -> tuple[int, ...]:
    """One number for each of `count` dimensions."""
    if isinstance(value, int):
        return (value,) * count
    numbers = tuple(int(item) for item in value)
    return numbers * count if len(numbers) == 1 else numbers


def flat(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """`(1, 2)` for the arguments `1, 2` as well as for the one argument `(1, 2)`."""
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else tuple(sizes)
