"""Tells a measurement when a collective holds up the thread that computes."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, Protocol, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Watch(Protocol):
    """Is told of every wait in this process; waits may lie in each other."""

    def enter(self) -> None:
        """A wait begins."""

    def leave(self) -> None:
        """It is over."""


_watch: Watch | None = None


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Let `watch` be told, while entered. What a user has compiled waits unseen."""
    global _watch
    before, _watch = _watch, watch
    try:
        yield
    finally:
        _watch = before


def waits(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make a function that waits for other ranks, and does nothing else, one that says so."""

    @functools.wraps(function)
    def watched(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        watch = _watch
        if watch is None:
            return function(*args, **kwargs)
        watch.enter()
        try:
            return function(*args, **kwargs)
        finally:
            watch.leave()

    return watched
