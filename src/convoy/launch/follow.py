"""A rank ends with the process that started it, and with the other ranks, also where a collective holds it up."""

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

from convoy.failure import read_failures

GRACE_S = 2.0
"""Seconds after a rank's failure in which the others may find that out by themselves."""
_POLL_S = 0.25
_PR_SET_PDEATHSIG = 1


def follow(parent: int, folder: Path, rank: int) -> None:
    """End with the starting process, however that ended; soon after any rank has failed; and soon after SIGTERM, whose
    handler must wait while the main thread is in a collective.

    Args:
        parent: number of the starting process.
        folder: where the ranks of this attempt leave word.
        rank: this one.
    """
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    signals, theirs = os.pipe()
    os.set_blocking(theirs, False)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget)  # a loader's signals are not this process's

    def watch() -> None:
        since = None
        while since is None or time.monotonic() - since < GRACE_S:
            ready, _, _ = select.select([signals], [], [], _POLL_S)
            asked = ready and signal.SIGTERM in os.read(signals, 64)
            if os.getppid() != parent:
                os._exit(1)
            if since is None and (asked or any(folder.glob("failure-*.json"))):
                since = time.monotonic()
        leave(folder, rank)
        os._exit(status_of(folder, 1))

    threading.Thread(target=watch, daemon=True, name="convoy-follow").start()


def end_with_parent() -> None:
    """Have Linux kill this process when the one that made it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave(folder: Path, rank: int) -> None:
    """Note that this rank's end is not the cause of the others'."""
    with contextlib.suppress(OSError):
        (folder / f"ended-{rank}").touch()


def status_of(folder: Path, status: int) -> int:
    """The exit status of a rank: 0 where starting again would not mend what has happened."""
    if not int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        return status
    return 0 if any(failure.final for failure in read_failures(folder)) else status


def _forget() -> None:
    with contextlib.suppress(ValueError):  # not the main thread
        signal.set_wakeup_fd(-1)
