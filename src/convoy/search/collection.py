"""Python's collector of cycles, out of the way of what makes very many small objects and no cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """While entered, cycles are not looked for: the looking goes through all living objects again and again, which is a
    third of the time of a search over many strategies."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
