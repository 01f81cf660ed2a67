"""Custom autograd functions are one call each: what they do inside has a backward pass of their own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction

from convoy.graph.functions import Apply

Record = Callable[[Any, tuple[Any, ...], dict[str, Any], Callable[..., Any]], Any]


@contextmanager
def custom_functions(record: Record, recomputed: Callable[[], None]) -> Iterator[None]:
    """Within it, `F.apply(...)` of a custom function calls `record(function, args, kwargs, run)`.

    Activation checkpointing, which is such a function too, runs what it is given as if it were called directly.
    `recomputed()` is called where it begins, and where autograd is asked in another way not to keep what it needs.
    """
    enter = saved_tensors_hooks.__enter__
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            recomputed()
            return args[0](*args[2:])
        if cls.__module__ == CheckpointFunction.__module__:  # torch 2.11 keeps the inputs by one, of no result
            return original.__get__(None, cls)(*args, **kwargs)
        return record(Apply(cls), args, kwargs, original.__get__(None, cls))

    def noting(self: saved_tensors_hooks) -> None:
        recomputed()
        enter(self)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    saved_tensors_hooks.__enter__ = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
