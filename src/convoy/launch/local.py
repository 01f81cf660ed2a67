"""Starts one process for each device of this machine, hands signals on to them, ends them together, and starts them
again where one has failed.

torch's elastic launcher would do the same for one host, but knows a failure only by an exit status, keeps the numbers
of its processes to itself and sends SIGTERM by itself: what the ranks would have to work around took more than this.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from convoy import interfaces
from convoy.failure import AGENTS, Failure, cause, end_of, read_error_file
from convoy.launch.rank import FOLDER, GRACE_S, HANDED_ON, mark, outlives, private_folder
from convoy.terminal import waiting_for

# By the signal that comes, the one for the ranks: SIGTERM to one of them alone ends it.
FORWARDED = {signal.Signals[name]: number for number, name in HANDED_ON.items()}
_POLL_S = 0.05  # after which a signal is handed on, at the latest
_KILLED_S = 10.0  # in which a rank that was killed is gone

Rank = subprocess.Popen[bytes]


def start(
    arguments: Sequence[str],
    num_devices: int,
    verbose: bool = False,
    max_restarts: int = 0,
    advice: Callable[[], str] = str,
    on_failure: Callable[[Failure], None] = lambda failure: None,
) -> int:
    """Run `python -m convoy ARGUMENTS` as `num_devices` ranks until they end; the exit status.

    Signals are handed on to every rank. When one rank fails all end, and its name and reason are printed, with `advice`
    where it was killed; unless it was a mistake of the user, all are started again as often as `max_restarts` says.
    When this process ends, whatever ends it, so do the ranks.
    """
    job = {"TORCHELASTIC_RUN_ID": uuid.uuid4().hex, "TORCHELASTIC_MAX_RESTARTS": str(max_restarts)}
    restart = 0
    with _signals() as signals:
        while True:
            with private_folder() as folder:
                variables = job | {"TORCHELASTIC_RESTART_COUNT": str(restart)}
                with _ranks(["-m", "convoy", *arguments], num_devices, folder, variables) as ranks:
                    failure = _watched(ranks, folder, signals)
            if failure is None:
                return max(rank.returncode for rank in ranks)
            if failure.final or signals or restart == max_restarts:
                break
            restart += 1
            again = f"all ranks start again (restart {restart} of {max_restarts})"
            print(f"{failure.reason}; {again}", file=sys.stderr, flush=True)
    if failure.kind == "killed" and (advised := advice()):
        failure = replace(failure, sentence=f"{failure.sentence}; {advised}")
    print(failure.text(verbose), file=sys.stderr, flush=True)
    on_failure(failure)
    return failure.status


@contextmanager
def _ranks(arguments: Sequence[str], number: int, folder: Path, variables: dict[str, str]) -> Iterator[list[Rank]]:
    """The processes of all ranks, which have the variables of torchrun's and end with this context."""
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"} | dict(os.environ) | variables
    environment |= {FOLDER: str(folder), AGENTS: str(os.getpid()), interfaces.STORE: str(folder / "store")}
    environment |= {"GROUP_RANK": "0", "WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # of a torchrun around this
    loopback = interfaces.loopback()
    if loopback is not None:
        environment = dict.fromkeys(interfaces.VARIABLES, loopback) | environment  # no other host reaches them there
    ranks: list[Rank] = []
    # These wait for a rank until it can take them (`convoy.launch.rank.as_rank`).
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    try:
        try:
            for rank in range(number):
                place = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "TORCHELASTIC_ERROR_FILE": str(_error_file(folder, rank)),
                }
                command = [sys.executable, *arguments]
                ranks.append(subprocess.Popen(command, env=environment | place, start_new_session=True))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield ranks
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):  # with what it started: a rank leads its session
                os.killpg(process.pid, signal.SIGKILL)
        for process in ranks:
            with suppress(subprocess.TimeoutExpired):  # one that waits for a file system for ever
                process.wait(_KILLED_S)


def _watched(ranks: Sequence[Rank], folder: Path, signals: Sequence[signal.Signals]) -> Failure | None:
    """Wait until all ranks have ended, or one has failed and the others have had time to notice it; the cause."""
    num_handed_on, until = 0, float("inf")
    with ExitStack() as message:
        message.enter_context(waiting_for(f"starting {len(ranks)} processes"))
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
            time.sleep(_POLL_S)
            if all(mark(folder, "ready", rank).exists() for rank in range(len(ranks))):
                message.close()  # they speak for themselves
            come = tuple(signals)  # more may come at any time
            if signal.SIGQUIT in come:
                return Failure(0, "interrupted", "SIGQUIT: stopped at once", "", time.time())
            for number in come[num_handed_on:]:
                num_handed_on += 1
                for process in ranks:
                    process.send_signal(FORWARDED[number])
            if until == float("inf") and _failures(ranks, folder):
                until = time.monotonic() + GRACE_S
        return cause(_failures(ranks, folder))


def _error_file(folder: Path, rank: int) -> Path:
    """The file in which a rank leaves why it failed."""
    return folder / f"failure-{rank}.json"


def _failures(ranks: Sequence[Rank], folder: Path) -> list[Failure]:
    """Those that ranks have left, and those of ranks that ended without an error file."""
    failures = []
    for rank, process in enumerate(ranks):
        status, failure = process.poll(), read_error_file(_error_file(folder, rank))
        if failure is None and status and not mark(folder, "ended", rank).exists() and (status < 0 or folder.exists()):
            failure = Failure(rank, "killed", f"it {end_of(status)}", "", time.time())
        failures += [] if failure is None else [failure]  # without the folder a rank says by itself why it ended
    return failures


@contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """The signals that come from now on."""
    signals: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(signal.Signals(number))

    main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in (*FORWARDED, signal.SIGQUIT) if main and not outlives(number)]
    handlers = {number: signal.signal(number, note) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
