"""One process at a time writes in a folder: an advisory lock on a file in it, which ends with its process.

The file stays: a lock on a file that is removed keeps nobody out. It is open for writing, as NFS has it.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from convoy.errors import ConvoyError

NAME = ".lock"
_LOOK_S = 0.5
"""Seconds that anyone waits: somebody may just be looking whether the lock is free."""


@contextmanager
def locked(
    folder: Path, patience_s: float = 0.0, tell: Callable[[str], None] = lambda sentence: None
) -> Iterator[None]:
    """Keep other processes from training in a folder.

    Args:
        folder: is there.
        patience_s: seconds to wait for a process that is about to end.
        tell: takes a sentence on a longer wait, and on a file system without locks, where nobody is kept out.

    Raises:
        ConvoyError: another process does already, or the folder cannot be written to.
    """
    try:
        file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConvoyError(f"cannot write to {folder} ({error.strerror}): choose another --out") from error
    try:
        if _wait_for(file, folder, max(_LOOK_S, patience_s), tell):
            with contextlib.suppress(OSError):  # say whose it is, if there is room
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        else:
            tell(f"the file system of {folder} knows no locks: see to it that no other process trains there")
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # closing would leave it to what was forked meanwhile
        os.close(file)


def is_locked(folder: Path) -> bool | None:
    """Whether a process trains in a folder now; None where that cannot be told."""
    try:
        file = os.open(folder / NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        taken = _take(file, fcntl.LOCK_SH)
    finally:
        os.close(file)
    return None if taken is None else not taken


def busy(folder: Path) -> str:
    """What to say where another process trains in a folder."""
    return f"another process is training in {folder}{_holder(folder)}: wait for its end, or choose another --out"


def _wait_for(file: int, folder: Path, patience_s: float, tell: Callable[[str], None]) -> bool:
    """Take the lock.

    Returns:
        False where there are none.
    """
    began, told = time.monotonic(), False
    while (taken := _take(file, fcntl.LOCK_EX)) is False:
        waited = time.monotonic() - began
        if waited >= patience_s:
            raise ConvoyError(busy(folder))
        if not told and waited > _LOOK_S:
            told = True
            tell(f"waiting for the end of another process that is training in {folder}{_holder(folder)}")
        time.sleep(0.1)
    return taken is not None


def _take(file: int, kind: int) -> bool | None:
    """Whether this process has the lock now; None where the file system has none."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _holder(folder: Path) -> str:
    """Who has signed last, in words."""
    try:
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return f" (process {found['process']} on host {found['host']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
