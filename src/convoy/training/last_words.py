"""What a run that fails leaves behind: why, in one sentence, without waiting for a disk that does not answer."""

import contextlib
import threading
from collections.abc import Callable

from convoy.errors import ConvoyError
from convoy.failure import failure_of
from convoy.training.storage.run_directory import RunDirectory
from convoy.training.summary import note_failure

WRITE_S = 5.0
"""Seconds that a file system is given to answer when the run has failed."""


def sentence_of(error: BaseException, rank: int) -> str:
    """An exception of a rank in one sentence, as it is printed."""
    return failure_of(rank, error).sentence


def briefly(write: Callable[[], None], seconds: float = WRITE_S) -> None:
    """Write something if that can be, but do not wait for a file system that does not answer."""

    def try_it() -> None:
        with contextlib.suppress(Exception):
            write()

    thread = threading.Thread(target=try_it, daemon=True, name="convoy-summary")
    thread.start()
    thread.join(seconds)


class Witness:
    """Notes from outside why a run's processes failed: those that are killed cannot do so themselves.

    Args:
        run: that they are about to begin, or to go on with.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._before = self._stamp()

    def note(self, sentence: str) -> None:
        """Put it into the summary, if it was they who wrote that, and nobody goes on with the run already.

        A run that was stopped stays so: all that it had done was saved before.
        """
        with contextlib.suppress(OSError, ConvoyError):
            if self._stamp() != self._before:
                with self._run.lock():
                    if self._run.summary().get("status") != "stopped":
                        note_failure(self._run, sentence)

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self._run.summary_file.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns
