"""Starts one process for each device of this machine, through torch's elastic launcher."""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from convoy import interfaces
from convoy.failure import Failure, cause, end_of, read_failures
from convoy.late import waiting_for
from convoy.launch.rank import FOLDER, HANDED_ON, PARENT, outlives, private_folder
from convoy.launch.torchrun import BACKEND, register

# By the signal that comes, the one for the ranks, which take SIGTERM as the end: torch's launcher sends it when another
# rank has failed.
FORWARDED = {signal.Signals[name]: number for number, name in HANDED_ON.items()}

SHUTDOWN_S = 5  # seconds that torch's launcher leaves the ranks to end by themselves before it kills them


def start(
    arguments: Sequence[str],
    num_devices: int,
    verbose: bool = False,
    max_restarts: int = 0,
    advice: Callable[[], str] = str,
    on_failure: Callable[[Failure], None] = lambda failure: None,
) -> int:
    """Run `python -m convoy ARGUMENTS` as `num_devices` ranks until they end.

    SIGINT, SIGTERM, SIGHUP and SIGUSR2 are handed on to every rank. When one rank fails all end, and its name and
    reason are printed, with `advice` where it was killed; unless it was a mistake of the user, all are started again as
    often as `max_restarts` says. When this process ends, whatever ends it, so do the ranks. The exit status is that of
    rank 0, 2 for a mistake of the user, 1 for any other failure.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    register()
    for name in ("", ".agent.server.api"):  # the second has a level of its own
        logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.CRITICAL)
    with private_folder() as folder:
        started = _Started(folder)
        starting = partial(_tell_of_start, started, num_devices)
        with _environment(folder), _forwarding(started), _beside(started.watch), _beside(starting):
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=num_devices,
                run_id=uuid.uuid4().hex,
                rdzv_backend=BACKEND,
                rdzv_configs={"file": folder / "store"},
                max_restarts=max_restarts,
                monitor_interval=0.1,
                logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
                signals_to_handle="SIGQUIT",
            )
            silent: list[Failure] = []
            status = 0
            try:
                elastic_launch(config, sys.executable)("-m", "convoy", *arguments)
            except ChildFailedError as error:
                for rank, failed in error.failures.items():
                    if not folder.exists() and (failed.exitcode > 0 or failed.exitcode == -signal.SIGTERM):
                        status = max(status, failed.exitcode, 1)  # it has said why, or was ended with a rank that has
                        continue
                    sentence = "; ".join(filter(None, (f"it {end_of(failed.exitcode)}", advice())))
                    silent.append(Failure(rank, "killed", sentence, "", time.time()))
            except SignalException as error:
                silent.append(Failure(0, "interrupted", f"{error.sigval.name}: stopped at once", "", time.time()))
        started.look()
        attempt = folder / f"attempt-{started.attempt}"
        failure = cause([*read_failures(attempt), *silent])
        if failure is not None:
            print(failure.text(verbose), file=sys.stderr, flush=True)
            on_failure(failure)
            return failure.status
        place = attempt / "status"
        return int(place.read_text()) if place.exists() else status


class _Started:
    """The ranks of the newest attempt, by the files in which each leaves its process number. Numbers are kept once
    read, as a file in the temporary directory may be removed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.attempt, self.pids = folder, 0, dict[int, int]()

    def look(self) -> None:
        newest = max((int(path.name.partition("-")[2]) for path in self.folder.glob("attempt-*")), default=0)
        if newest > self.attempt:
            self.attempt, self.pids = newest, {}
        for place in self.folder.glob(f"attempt-{self.attempt}/pid-*"):
            with contextlib.suppress(OSError, ValueError):  # a file that is being written
                self.pids[int(place.name.partition("-")[2])] = int(place.read_text())

    def watch(self, done: threading.Event) -> None:
        """Keep looking, and kill the ranks that still run some time after one has failed, as a stopped one does; torch
        would wait longer."""
        since: dict[int, float] = {}
        while not done.wait(0.1):
            self.look()
            if not any(self.folder.glob(f"attempt-{self.attempt}/failure-*.json")):
                continue
            if time.monotonic() - since.setdefault(self.attempt, time.monotonic()) > SHUTDOWN_S:
                since[self.attempt] = float("inf")
                for pid in list(self.pids.values()):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)


@contextmanager
def _environment(folder: Path) -> Iterator[None]:
    old_environment = dict(os.environ)
    os.environ |= {FOLDER: str(folder), PARENT: str(os.getpid())}
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    loopback = interfaces.loopback()
    if loopback is not None:
        for name in interfaces.VARIABLES:  # no other host reaches them there
            os.environ.setdefault(name, loopback)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(old_environment)


@contextmanager
def _beside(watch: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run a function in a thread of its own until this context ends and sets the event."""
    done = threading.Event()
    thread = threading.Thread(target=watch, args=(done,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _tell_of_start(started: _Started, num_devices: int, done: threading.Event) -> None:
    """Tell a terminal that ranks are starting, which takes seconds, until they speak for themselves."""
    with waiting_for(f"starting {num_devices} processes"):
        while not done.wait(0.05) and len(started.pids) < num_devices and not started.attempt:
            pass


@contextmanager
def _forwarding(started: _Started) -> Iterator[None]:
    """Hand signals on to the ranks: to those that are not there yet as soon as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    done = threading.Event()

    def hand_on(number: int, name: str) -> None:
        told: set[tuple[int, int]] = set()
        while not done.wait(0.02):  # also to those of the next attempt, where one of these has just failed
            started.look()
            for rank, pid in list(started.pids.items()):  # a copy, as another thread fills it
                if (started.attempt, rank) not in told:
                    told.add((started.attempt, rank))
                    with contextlib.suppress(OSError):
                        os.kill(pid, number)
            if not told and not started.folder.exists():
                stop = f"kill -KILL {os.getpid()} stops it without saving"
                print(f"{name}: nobody can be told, as {started.folder} is gone: {stop}", file=sys.stderr, flush=True)
                return

    def note(number: int, frame: FrameType | None) -> None:
        came = signal.Signals(number)
        threading.Thread(target=hand_on, args=(FORWARDED[came], came.name), daemon=True).start()

    old_handlers = {number: signal.signal(number, note) for number in FORWARDED if not outlives(number)}
    try:
        yield
    finally:
        done.set()
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
