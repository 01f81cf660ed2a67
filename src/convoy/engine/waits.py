"""Tells a measurement, and who watches over the run, when a collective holds up the thread that computes."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, Protocol, TypeVar

import torch

from convoy.engine.position import here

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

    name = function.__name__.replace("_", " ")

    @functools.wraps(function)
    def watched(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_compiling() or here.collective:
            return function(*args, **kwargs)
        watch = _watch
        if watch is not None:
            watch.enter()
        began = here.moved = time.monotonic()
        here.collective = name
        try:
            return function(*args, **kwargs)
        finally:
            here.collective = ""
            here.moved = time.monotonic()
            here.waited_s += here.moved - began
            if watch is not None:
                watch.leave()

    return watched
