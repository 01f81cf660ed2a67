"""A process that is one of several ranks: it finds its place by its launcher's variables, ends with the others, and
reports why it failed, in a folder where the process that started it looks."""

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from convoy.errors import ConvoyError
from convoy.failure import AGENTS, Failure, Kind, failure_of, write_error_file
from convoy.interfaces import number_of
from convoy.resources import check_threads
from convoy.slurm import translate

FOLDER = "CONVOY_LAUNCH"  # variable of ranks that `convoy.launch.start` has started: the folder that they share
# To a rank: the run as a whole is to stop, where SIGTERM ends this rank alone. SIGUSR1 may have a handler of NCCL's or
# of a profiler; the first real-time signal is nobody's. macOS has none.
STOP = getattr(signal, "SIGRTMIN", signal.SIGUSR1)
# The signals that ask a rank to stop, and their names where the starting process received them.
HANDED_ON: Mapping[int, str] = {
    signal.SIGINT: "SIGINT",
    STOP: "SIGTERM",
    signal.SIGUSR2: "SIGUSR2",
    signal.SIGHUP: "SIGHUP",
}


def outlives(number: int) -> bool:
    """Whether this process was started to outlive this signal, as `nohup` does for that of a closed terminal."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


@dataclass(frozen=True)
class RankPlace:
    """One rank among all."""

    rank: int
    num_ranks: int
    source: str  # its launcher, for sentences: `--devices`, `torchrun` or `Slurm`
    # where ranks leave error files for `convoy.launch.start`; None where it did not start them
    folder: Path | None = None
    job: str = ""  # its name, the same when ranks are started again; empty where nobody restarts them
    max_restarts: int = 0

    def check(self, devices: int | None) -> None:
        if devices is not None and devices != self.num_ranks:
            raise ConvoyError(
                f"--devices {devices} contradicts {self.source}, which started {self.num_ranks} "
                f"rank{'s' if self.num_ranks > 1 else ''}: leave --devices out, or start {devices}"
            )


def find_place(environment: MutableMapping[str, str] = os.environ) -> RankPlace | None:
    """The place of this process; None where nobody started several. Slurm's variables become torchrun's."""
    if "SLURM_PROCID" in environment:
        translate(environment)
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    source = "Slurm" if "SLURM_PROCID" in environment and "TORCHELASTIC_RUN_ID" not in environment else "torchrun"
    launch = environment.get(FOLDER)
    rank, num_ranks = (number_of(environment, name) for name in ("RANK", "WORLD_SIZE"))
    if not rank < num_ranks:
        raise ConvoyError(f"RANK={rank} must be below WORLD_SIZE={num_ranks}: start the ranks with torchrun")
    max_restarts, folder = int(environment.get("TORCHELASTIC_MAX_RESTARTS", 0)), Path(launch) if launch else None
    return RankPlace(rank, num_ranks, "--devices" if launch else source, folder, job(environment), max_restarts)


def job(environment: Mapping[str, str] = os.environ) -> str:
    """The name of the launcher of this process, which stays the same when ranks are started again: the identifier of
    torch's job, or its agent where the user gave none; or the number of Slurm's. Empty where nobody restarts."""
    if "TORCHELASTIC_RUN_ID" in environment:
        name = environment["TORCHELASTIC_RUN_ID"]
        return f"torchrun:{name}" if name != "none" else f"agent:{socket.gethostname()}:{os.getppid()}"
    return f"slurm:{environment['SLURM_JOB_ID']}" if environment.get("SLURM_JOB_ID") else ""


_PREFIX = "convoy-launch-"
_SOON_S = 60.0  # a folder that is younger may not be locked yet


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder of mode 0700 in the temporary directory; folders of processes that were killed are removed. It is
    locked while its process lives: systemd, which removes what is ten days old, leaves that alone, too."""
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = _locked(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """A file descriptor that holds the lock of a folder; None where it is not this user's, or another process's."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # it is taken, or the file system has no locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid == os.geteuid():
            return lock
    os.close(lock)
    return None


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.lstat().st_mtime > _SOON_S and (lock := _locked(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


GRACE_S = 2.0  # seconds after a rank's failure in which the other ranks may notice it by themselves
_POLL_S = 0.25
_PR_SET_PDEATHSIG = 1
_ENDED_FIRST = "100"  # counts as a tenth of the memory more than the process has


def follow(parent: int, stop: Callable[[str], None]) -> None:
    """End with the starting process, and soon after a signal to stop, whose handler waits for a collective to end."""
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    signals, sender = os.pipe()
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget)  # signals of a loader's workers are not for this process

    def watch() -> None:
        stopped: list[int] = []
        while not stopped:
            ready, _, _ = select.select([signals], [], [], _POLL_S)
            stopped = [number for number in (os.read(signals, 64) if ready else b"") if number in HANDED_ON]
            if os.getppid() != parent:
                os._exit(1)
        time.sleep(GRACE_S)
        stop(HANDED_ON[stopped[0]])

    threading.Thread(target=watch, daemon=True, name="convoy-follow").start()


def end_with_parent() -> None:
    """Have Linux kill this process when the one that made it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def mark(folder: Path, state: Literal["ready", "ended"], rank: int) -> Path:
    """The file that is there once a rank is `ready` to take signals, or has `ended` in good order, so that its status
    is that of its run."""
    return folder / f"{state}-{rank}"


def _forget() -> None:
    with contextlib.suppress(ValueError):  # not the main thread
        signal.set_wakeup_fd(-1)


Hang = Callable[[str], None]  # ends this rank, from any thread, with a sentence on what it waited for in vain


@contextmanager
def as_rank(place: RankPlace, saves: bool = False) -> Iterator[Hang]:
    """Run as the rank at a place. An exception that leaves this context is reported and ends the process: it is left
    for a starting process that prints it. The function that is yielded ends the rank where its main thread cannot;
    `saves` says whether a rank that is asked to stop may be expected to save something."""
    folder = place.folder

    def end(kind: Kind, sentence: str) -> None:
        _fail(Failure(place.rank, kind, sentence, "", time.time()), folder)

    def stop(name: str) -> None:
        end("interrupted", f"{name}: stopped at once{', without saving' if saves else ''}")

    try:
        if folder is not None:
            _prepare(place.rank, folder, stop)
        yield partial(end, "hung")
    except _StoppedEarly as stopped:
        stop(str(stopped))
    except (Exception, KeyboardInterrupt) as error:
        if place.num_ranks == 1:
            raise
        _fail(failure_of(place.rank, error), folder)


def _prepare(rank: int, folder: Path, stop: Callable[[str], None]) -> None:
    """Take the signals of a rank that `convoy.launch.start` started, and say that it is there."""

    def unraisable(lost: "sys.UnraisableHookArgs", show: Callable[..., None] = sys.unraisablehook) -> None:
        if not isinstance(lost.exc_value, _StoppedEarly):  # lost in a finalizer; `follow` ends this rank
            show(lost)

    with contextlib.suppress(OSError):  # for lack of memory a rank is to be killed, not the process that can report it
        Path("/proc/self/oom_score_adj").write_text(_ENDED_FIRST)
    check_threads()
    follow(int(os.environ[AGENTS]), stop)
    sys.unraisablehook = unraisable
    for number in HANDED_ON:
        if not outlives(number):
            signal.signal(number, _stop_early)
    mark(folder, "ready", rank).touch()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)


def ended(place: RankPlace, status: int) -> int:
    """The status of this process after a run that ended in good order, and rank 0 has written everything. Each of
    torchrun's agents judges the ranks of its host alone; srun and Convoy's launcher take the highest status."""
    if place.folder is not None:
        with contextlib.suppress(OSError):
            mark(place.folder, "ended", place.rank).touch()
    return 0 if place.rank > 0 and (place.folder is not None or place.source == "Slurm") else status


class _StoppedEarly(BaseException):
    """The run is to stop by this signal, and has not begun or was asked before."""


def _stop_early(number: int, frame: Any) -> None:
    raise _StoppedEarly(HANDED_ON[number])


def _fail(failure: Failure, folder: Path | None) -> None:
    """Report a failure and end, whatever becomes of the report."""
    verbose = "-v" in sys.argv or "--verbose" in sys.argv
    if not write_error_file(failure, verbose):
        with contextlib.suppress(OSError, ValueError):
            print(failure.text(verbose), file=sys.stderr, flush=True)
    if failure.kind == "lost" and folder is None:  # the rank that was lost is the cause, and is to be noticed first
        time.sleep(GRACE_S)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(failure.status)  # at once: tearing down connections to ranks that are gone may take forever
