"""Starts one process for each device of this machine, through torch's elastic launcher."""

import contextlib
import logging
import os
import signal
import sys
import tempfile
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
from convoy.launch.place import FOLDER, STOP
from convoy.launch.rank import PARENT
from convoy.launch.torchrun import BACKEND, register

# A rank takes SIGTERM as the end (torch's launcher sends it when another rank has failed); a request to the run
# as a whole comes as STOP.
FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGUSR2: signal.SIGUSR2,
    signal.SIGTERM: STOP,
}

SHUTDOWN_S = 5
"""Seconds that torch's launcher leaves the ranks to end by themselves before it kills them."""


def start(
    arguments: Sequence[str],
    num_devices: int,
    verbose: bool = False,
    max_restarts: int = 0,
    advice: Callable[[], str] = str,
    on_failure: Callable[[Failure], None] = lambda failure: None,
) -> int:
    """Run `python -m convoy ARGUMENTS` as `num_devices` ranks until they end.

    SIGINT, SIGTERM and SIGUSR2 are handed on to every rank. When one rank fails all end, and its name and reason are
    printed; unless it was a mistake of the user, all are started again as often as `max_restarts` says. When this
    process ends, whatever ends it, so do the ranks.

    Args:
        arguments: of the command line.
        num_devices: how many ranks.
        verbose: print the traceback of a mistake too.
        max_restarts: how often the ranks may be started again.
        advice: says what to do when a rank was killed.
        on_failure: called with the failure that is printed, when no rank runs any more.

    Returns:
        The exit status: that of rank 0, 2 for a mistake of the user, 1 for any other failure.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    register()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="convoy-launch-") as name:
        folder = Path(name)
        late, starting = partial(_kill_the_late, folder), partial(_tell_of_start, folder, num_devices)
        with _environment(folder), _forwarding(folder, num_devices), _beside(late), _beside(starting):
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=num_devices,
                run_id=uuid.uuid4().hex,
                rdzv_backend=BACKEND,
                rdzv_endpoint="127.0.0.1:0",
                max_restarts=max_restarts,
                monitor_interval=0.1,
                logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
                signals_to_handle="SIGQUIT",
            )
            silent: list[Failure] = []
            try:
                elastic_launch(config, sys.executable)("-m", "convoy", *arguments)
            except ChildFailedError as error:
                for rank, failed in error.failures.items():
                    sentence = "; ".join(filter(None, (f"it {end_of(failed.exitcode)}", advice())))
                    silent.append(Failure(rank, "killed", sentence, "", time.time()))
        attempt = _newest(folder)
        failure = cause([*read_failures(attempt), *silent])
        if failure is not None:
            print(failure.text(verbose), file=sys.stderr, flush=True)
            on_failure(failure)
            return failure.status
        status = attempt / "status"
        return int(status.read_text()) if status.exists() else 0


def _newest(folder: Path) -> Path:
    numbers = [int(path.name.partition("-")[2]) for path in folder.glob("attempt-*")]
    return folder / f"attempt-{max(numbers, default=0)}"


@contextmanager
def _environment(folder: Path) -> Iterator[None]:
    """The environment that the ranks inherit."""
    before = dict(os.environ)
    os.environ |= {FOLDER: str(folder), PARENT: str(os.getpid())}
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    loopback = interfaces.loopback()
    if loopback is not None:
        for name in interfaces.VARIABLES:  # nobody else can reach them there
            os.environ.setdefault(name, loopback)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _beside(watch: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run a function in a thread of its own until this context ends, which the event tells it."""
    done = threading.Event()
    thread = threading.Thread(target=watch, args=(done,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _kill_the_late(folder: Path, done: threading.Event) -> None:
    """Kill what still runs some time after a rank has failed, as one that is stopped does; torch would wait longer."""
    since: dict[Path, float] = {}
    while not done.wait(0.25):
        attempt = _newest(folder)
        if not any(attempt.glob("failure-*.json")):
            continue
        if time.monotonic() - since.setdefault(attempt, time.monotonic()) > SHUTDOWN_S:
            since[attempt] = float("inf")
            for place in attempt.glob("pid-*"):
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int(place.read_text()), signal.SIGKILL)


def _tell_of_start(folder: Path, num_devices: int, done: threading.Event) -> None:
    """Tell a terminal that ranks are started, which takes seconds, until they are there and speak for themselves."""
    with waiting_for(f"starting {num_devices} processes"):
        while not done.wait(0.05) and len(list(folder.glob("attempt-0/pid-*"))) < num_devices:
            pass


@contextmanager
def _forwarding(folder: Path, num_devices: int) -> Iterator[None]:
    """Hand signals on to the ranks: to those that are not there yet as soon as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    done = threading.Event()

    def hand_on(number: int) -> None:
        told: set[Path] = set()
        while not done.wait(0.02):  # also to those of the next attempt, where one of these has just failed
            attempt = _newest(folder)
            for place in {attempt / f"pid-{rank}" for rank in range(num_devices)} - told:
                with contextlib.suppress(OSError, ValueError):
                    pid = int(place.read_text())
                    told.add(place)
                    os.kill(pid, number)

    def note(number: int, frame: FrameType | None) -> None:
        forwarded = FORWARDED[signal.Signals(number)]
        threading.Thread(target=hand_on, args=(forwarded,), daemon=True).start()

    before = {number: signal.signal(number, note) for number in FORWARDED}
    try:
        yield
    finally:
        done.set()
        for number, handler in before.items():
            signal.signal(number, handler)
