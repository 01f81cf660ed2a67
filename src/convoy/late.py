"""Late imports: torch takes seconds, for which no `--help` and no misspelt option is to wait."""

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

AFTER_S = 1.0  # seconds of silence after which a terminal shows a message


def lazily(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package, which imports its public names when they are first used.

    `names` are by module below the package, with spaces between them. No module may have the name itself: once it is
    imported it would stand there.
    """
    modules = {name: module for module, line in names.items() for name in line.split()}

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return find


@contextmanager
def waiting_for(what: str, after_s: float = AFTER_S) -> Iterator[None]:
    """Show a terminal a message ("loading PyTorch") if this takes longer than `after_s`; the line is gone at the end.
    Ranks leave it to their starter."""
    stream = sys.stderr
    if not stream.isatty() or "RANK" in os.environ:
        yield
        return
    lock, shown, done = threading.Lock(), threading.Event(), threading.Event()

    def show() -> None:
        with lock:
            if not done.is_set():
                shown.set()
                stream.write(f"{what} …")
                stream.flush()

    timer = threading.Timer(after_s, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            done.set()
            if shown.is_set():
                stream.write("\r\x1b[K")
                stream.flush()
