"""How a network is called: its tensors, what is no tensor, and for which modes and sizes a program is made."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from convoy.errors import ConvoyError

Kind = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Form:
    """The arguments of a call but for their tensors.

    Attributes:
        positional: the arguments by position, with `Tensor` in place of each tensor.
        named: those by keyword, likewise.
    """

    positional: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether all arguments are tensors, given by position."""
        return not self.named and all(value is Tensor for value in self.positional)

    def fill(self, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with these tensors."""
        rest = iter(tensors)
        args = [next(rest) if value is Tensor else value for value in self.positional]
        return args, {name: next(rest) if value is Tensor else value for name, value in self.named}

    def caller(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the tensors alone, whose parameters are called as those of `forward`."""

        def call(*tensors: Any) -> Any:
            args, kwargs = self.fill(tensors)
            return forward(*args, **kwargs)

        names = [f"input_{place}" for place in range(len(self.positional))]
        for place, name in enumerate(list(inspect.signature(forward).parameters)[: len(names)]):
            names[place] = name
        names = [n for n, value in zip(names, self.positional, strict=True) if value is Tensor]
        names += [name for name, value in self.named if value is Tensor]
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in dict.fromkeys(names)]
        )
        return call


def arguments(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Tensor, ...], Form]:
    """The tensors of a call `model(*args, **kwargs)` in order, and its form; the same for either way to name one.

    Raises:
        ConvoyError: there is no tensor, an argument holds tensors, or `forward` does not take these arguments.
    """
    if not kwargs and all(isinstance(value, Tensor) for value in args) and args:
        return tuple(args), Form((Tensor,) * len(args))
    if kwargs:
        try:
            bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs)
        except TypeError as error:
            raise ConvoyError(f"{type(model).__name__}.forward: {error}") from error
        args, kwargs = bound.args[1:], bound.kwargs
    values = [*args, *kwargs.values()]
    tensors = tuple(value for value in values if isinstance(value, Tensor))
    if not tensors:
        raise ConvoyError("the network is called without a tensor: pass samples along dim 0 of at least one")
    for name, value in [*((f"{place}", value) for place, value in enumerate(args)), *kwargs.items()]:
        try:
            hash(value)
        except TypeError as error:
            raise ConvoyError(
                f"argument {name} of the network is a {type(value).__name__}: pass tensors by themselves, and beside "
                "them only what does not change, as numbers, text, tuples of these or None"
            ) from error
    positional = tuple(Tensor if isinstance(value, Tensor) else value for value in args)
    named = tuple((name, Tensor if isinstance(value, Tensor) else value) for name, value in sorted(kwargs.items()))
    ordered = [*args, *(kwargs[name] for name, _ in named)]
    return tuple(value for value in ordered if isinstance(value, Tensor)), Form(positional, named)


@dataclass(frozen=True)
class Signature:
    """What a program is made for.

    Attributes:
        training: the mode.
        samples: of every sample rank.
        inputs: the inputs' sizes but for the samples, and their types.
        form: the other arguments; None where there are none but positional tensors.
        as_given: whether the outputs stay as the last layers give them.
    """

    training: bool
    samples: tuple[int, ...]
    inputs: tuple[Kind, ...]
    form: Form | None = None
    as_given: bool = False


def kinds(inputs: Sequence[Tensor]) -> tuple[Kind, ...]:
    """Sizes but for the samples, and types."""
    return tuple((tuple(x.shape[1:]), x.dtype) for x in inputs)
