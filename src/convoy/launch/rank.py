"""What a process does because it is one of several: it ends with the others, and says why it failed."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from convoy.launch.failure import Failure, failure_of, leave_word
from convoy.launch.place import Place

PARENT = "CONVOY_LAUNCHER"
GRACE_S = 2.0
"""Seconds after a rank's failure in which the others may find that out by themselves."""
_POLL_S = 0.25
_PR_SET_PDEATHSIG = 1


@contextmanager
def as_rank(place: Place) -> Iterator[None]:
    """Run as the rank at a place. An exception that leaves this context is reported and ends the process.

    A rank that `convoy.launch.start` started leaves its failure for the starting process to print; others print it
    themselves. Warnings of ranks other than 0 bear their number.
    """
    if place.num_ranks > 1 and place.rank > 0:
        _prefix_warnings(place.rank)
    folder = Path(place.folder) if place.folder else None
    if folder is not None:
        _follow(int(os.environ[PARENT]), folder)
        (folder / f"pid-{place.rank}").write_text(str(os.getpid()))
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except Terminated:
        _end(1)
    except BaseException as error:
        failure = failure_of(place.rank, error)
        if place.num_ranks == 1:
            raise
        _report(failure, folder)
        _end(failure.status)


def ended(place: Place, status: int) -> int:
    """Hand the exit status of a run that came to its end in good order to the starting process.

    Returns:
        The status of this process: torch's launcher takes everything but 0 as a failure.
    """
    if place.folder is None:
        return status
    if place.rank == 0:
        (Path(place.folder) / "status").write_text(str(status))
    return 0


class Terminated(BaseException):
    """Another rank failed, so this one has to go."""


def _terminate(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def _report(failure: Failure, folder: Path | None) -> None:
    if folder is not None:
        failure.write(folder)
    else:
        with contextlib.suppress(OSError):
            leave_word(failure)
        verbose = "-v" in sys.argv or "--verbose" in sys.argv
        print(failure.text(verbose), file=sys.stderr, flush=True)
    if failure.kind == "lost":  # who was lost has the word, and is to be noticed first
        with contextlib.suppress(Terminated):
            time.sleep(GRACE_S)


def _end(status: int) -> None:
    """End at once: tearing down connections to ranks that are gone may take forever."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _follow(parent: int, folder: Path) -> None:
    """End with the starting process, however that ended, and soon after any rank has failed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        _end(1)

    def watch() -> None:
        since = None
        while since is None or time.monotonic() - since < GRACE_S:
            time.sleep(_POLL_S)
            if os.getppid() != parent:
                os._exit(1)
            if since is None and any(folder.glob("failure-*.json")):
                since = time.monotonic()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="convoy-follow").start()


def _prefix_warnings(rank: int) -> None:
    show = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        return f"rank {rank}: {show(message, category, filename, lineno, line)}"

    warnings.formatwarning = formatted
    handler: logging.StreamHandler[TextIO] = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"rank {rank}: %(message)s"))
    logging.getLogger().addHandler(handler)
