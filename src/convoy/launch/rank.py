"""A process that is one of several ranks: it ends with the others, and reports why it failed."""

import contextlib
import ctypes
import logging
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from convoy.failure import Failure, cause, failure_of, leave_word, read_failures, silent_ends
from convoy.launch.place import HANDED_ON, RankPlace, outlives

GRACE_S = 2.0  # seconds after a rank's failure in which the other ranks may notice it by themselves
_POLL_S = 0.25
_PR_SET_PDEATHSIG = 1
_ENDED_FIRST = "100"  # counts as a tenth of the memory more than the process has
_TERMINATED = 128 + signal.SIGTERM  # the status of a rank that SIGTERM ended, as a shell has it


def follow(parent: int, folder: Path, rank: int, stop: Callable[[str], None]) -> None:
    """End with the starting process, however that ended; soon after any rank has failed; and soon after a signal to
    stop, whose handler must wait while the main thread is in a collective."""
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    signals, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget)  # signals of a loader's workers are not for this process

    def watch() -> None:
        since, stopped, terminated = None, 0, False
        while since is None or time.monotonic() - since < GRACE_S:
            ready, _, _ = select.select([signals], [], [], _POLL_S)
            heard = os.read(signals, 64) if ready else b""
            stopped = next((number for number in heard if number in HANDED_ON), stopped)
            terminated = terminated or signal.SIGTERM in heard
            if os.getppid() != parent:
                os._exit(1)
            if since is None and (stopped or terminated or any(folder.glob("failure-*.json"))):
                since = time.monotonic()
        if stopped:
            stop(HANDED_ON[stopped])
        leave(folder, rank)
        os._exit(status_of(folder, _TERMINATED if terminated else 1))

    threading.Thread(target=watch, daemon=True, name="convoy-follow").start()


def end_with_parent() -> None:
    """Have Linux kill this process when the one that made it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave(folder: Path, rank: int) -> None:
    """Note that this rank's end is not the cause of the other ranks' ends."""
    with contextlib.suppress(OSError):
        (folder / f"ended-{rank}").touch()


def status_of(folder: Path, status: int) -> int:
    """The exit status of a rank: 0 where starting again would not help."""
    if not int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
        return status
    return 0 if any(failure.final for failure in read_failures(folder)) else status


def _forget() -> None:
    with contextlib.suppress(ValueError):  # not the main thread
        signal.set_wakeup_fd(-1)


PARENT = "CONVOY_LAUNCHER"
Hang = Callable[[str], None]  # ends this rank, from any thread, with a sentence on what it waited for in vain


@contextmanager
def as_rank(place: RankPlace, saves: bool = False) -> Iterator[Hang]:
    """Run as the rank at a place. An exception that leaves this context is reported and ends the process. A rank that
    `convoy.launch.start` or torchrun started leaves its failure for the starting process to print; any other prints it
    itself. Warnings of ranks other than 0 bear their number. The function that is yielded ends the rank where its main
    thread cannot; `saves` says whether a rank that is asked to stop may be expected to save something."""
    if place.num_ranks > 1 and place.rank > 0:
        _prefix_warnings(place.rank)
    folder = Path(place.folder) if place.folder else None
    ending = threading.Event()

    def stop(name: str) -> None:
        ending.set()
        sentence = f"{name}: stopped at once{', without saving' if saves else ''}"
        _fail(Failure(place.rank, "interrupted", sentence, "", time.time()), folder)

    if folder is not None:
        _prepare(place, folder, ending, stop)

    def hang(sentence: str) -> None:
        _fail(Failure(place.rank, "hung", sentence, "", time.time()), folder)

    try:
        try:
            yield hang
        except _StoppedEarly as stopped:
            stop(str(stopped))
        except (Exception, KeyboardInterrupt) as error:
            ending.set()
            if place.num_ranks == 1:
                raise
            _fail(failure_of(place.rank, error), folder)
    except _Terminated:
        _end(_TERMINATED)
    finally:
        ending.set()


def _prepare(place: RankPlace, folder: Path, ending: threading.Event, stop: Callable[[str], None]) -> None:
    """Take the signals of a rank that `convoy.launch.start` started, and say that it is there."""

    def terminate(number: int, frame: Any) -> None:
        leave(folder, place.rank)
        if ending.is_set():
            _end(_TERMINATED)
        ending.set()
        raise _Terminated("another rank failed")

    def unraisable(lost: "sys.UnraisableHookArgs", show: Callable[..., None] = sys.unraisablehook) -> None:
        if not isinstance(lost.exc_value, _Terminated | _StoppedEarly):  # lost in a finalizer; `follow` ends this rank
            show(lost)

    folder.mkdir(exist_ok=True)
    with contextlib.suppress(OSError):  # for lack of memory a rank is to be killed, not the process that can report it
        Path("/proc/self/oom_score_adj").write_text(_ENDED_FIRST)
    follow(int(os.environ[PARENT]), folder, place.rank, stop)
    sys.unraisablehook = unraisable
    for number in HANDED_ON:
        if not outlives(number):
            signal.signal(number, _stop_early)
    signal.signal(signal.SIGTERM, terminate)
    (folder / f"pid-{place.rank}").write_text(str(os.getpid()))
    if place.restarts and place.rank == 0:
        _say_why(place, folder)


def ended(place: RankPlace, status: int) -> int:
    """The status of this process after a run that ended in good order; the run's status goes to the starting process.
    Every rank calls it, after rank 0 has written everything: torch's launcher takes everything but 0 as a failure. Each
    of torchrun's agents judges the ranks of its own host alone, while srun takes the highest status."""
    if place.folder is None:
        return 0 if place.source == "Slurm" and place.rank > 0 else status
    folder = Path(place.folder)
    leave(folder, place.rank)
    if place.rank == 0:
        try:
            temporary = folder / "status.tmp"
            temporary.write_text(str(status))
            temporary.replace(folder / "status")
        except OSError:  # no room for it: the starting process sees this status
            return status
    return 0


class _Terminated(BaseException):
    """Another rank failed, so this one has to go."""


class _StoppedEarly(BaseException):
    """The run is to stop by this signal, and has not begun or was asked before."""


def _stop_early(number: int, frame: Any) -> None:
    raise _StoppedEarly(HANDED_ON[number])


def _fail(failure: Failure, folder: Path | None) -> None:
    """Report a failure and end, whatever becomes of the report."""
    verbose = "-v" in sys.argv or "--verbose" in sys.argv
    try:
        if folder is not None:
            failure.write(folder)
        elif not leave_word(failure, verbose):
            _print(failure.text(verbose))
    except OSError:  # no room for it
        _print(failure.text(verbose))
    if failure.kind == "lost":  # the rank that was lost is the cause, and is to be noticed first
        time.sleep(GRACE_S)
    _end(failure.status if folder is None else status_of(folder, failure.status))


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _say_why(place: RankPlace, folder: Path) -> None:
    last_attempt = folder.with_name(f"attempt-{place.restarts - 1}")
    why = cause([*read_failures(last_attempt), *silent_ends(last_attempt)])
    sentence = why.reason if why is not None else "a rank failed"
    number = f"restart {place.restarts} of {place.max_restarts}"
    print(f"{sentence}; all ranks start again ({number})", file=sys.stderr, flush=True)


def _end(status: int) -> None:
    """End at once: tearing down connections to ranks that are gone may take forever."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


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
