"""Calling a constructor that somebody else wrote, so that its failure is one sentence."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from convoy.errors import ConvoyError


class UnknownOptionError(ConvoyError):
    """A keyword that a network from elsewhere does not take."""

    def __init__(self, name: str, option: str, accepted: Iterable[str] = ()) -> None:
        choices = ", ".join(accepted)
        remedy = f"it accepts {choices}" if choices else "leave it out, or see what its constructor accepts"
        super().__init__(f"{name} has no option {option!r}: {remedy}")
        self.option = option


def called(name: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """What `function` returns; raises ConvoyError naming `name` where it fails."""
    try:
        return function(*arguments, **keywords)
    except ConvoyError:
        raise
    except Exception as error:
        option = str(error).partition("unexpected keyword argument '")[2].partition("'")[0]
        if isinstance(error, TypeError) and option in keywords:
            raise UnknownOptionError(name, option) from error
        raise ConvoyError(f"{name} could not be built, it failed with {reason(error)}") from error


def reason(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of `function` by name; none where it has no signature to read."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def takes(function: Callable[..., Any], keyword: str) -> str | None:
    """How `function` takes `keyword`: "explicitly", through "**kwargs", or not at all (None)."""
    known = parameters(function)
    kinds = inspect.Parameter
    if keyword in known and known[keyword].kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY):
        return "explicitly"
    if any(parameter.kind is kinds.VAR_KEYWORD for parameter in known.values()):
        return "**kwargs"
    return None
