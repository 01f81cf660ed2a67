"""torchrun: the commands that start one run on several hosts by it, and Convoy's part in its agent.

The agent loads this with all packages' entry points. Convoy's part is its rendezvous, and one sentence on the cause in
place of torchrun's pages when ranks that left an error file (`convoy.failure`) have failed. Other jobs end as they
would without Convoy.
"""

import contextlib
import logging
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from convoy.errors import ConvoyError
from convoy.failure import AGENTS, TRACEBACK, Failure, end_of, read_error_file, text_of

# Beginnings of torch's messages about ranks that failed, by logger.
_PAGES = {
    "torch.distributed.elastic.multiprocessing.api": ("Sending process", "failed (exitcode"),
    "torch.distributed.elastic.multiprocessing.errors.error_handler": ("no error file defined",),
}


def entry_point() -> Callable[[Any], Any]:
    """The function that makes a host's part in a rendezvous, as torchrun asks for it."""
    say_failures()
    return _make


def _make(params: Any) -> Any:
    from convoy.launch.rendezvous import make  # which needs what torch is importing while it asks for entry points

    return make(params)


def say_failures() -> None:
    """Print what Convoy's ranks have left in place of torchrun's pages."""
    old_hook = sys.excepthook
    if getattr(old_hook, "of_agent", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        text = None
        if kind.__name__ == "ChildFailedError":
            with contextlib.suppress(Exception):  # an unknown version of torch: its own pages are better than none
                text = _text(error)
        elif isinstance(error, ConvoyError) and not os.environ.get(TRACEBACK):
            text = f"convoy: {error}"
        if text is None:
            old_hook(kind, error, trace)
        else:
            print(text, file=sys.stderr, flush=True)

    hook.of_agent = True  # type: ignore[attr-defined]
    sys.excepthook = hook
    os.environ[AGENTS] = f"{os.environ.get(AGENTS, '')} {os.getpid()}".strip()
    for name in _PAGES:
        logging.getLogger(name).addFilter(_is_wanted)


def _text(error: BaseException) -> str | None:
    """The cause of torch's ChildFailedError; None where the ranks are not Convoy's."""
    failures: dict[int, Any] = error.failures  # type: ignore[attr-defined]
    left = {rank: read_error_file(failed.error_file) for rank, failed in failures.items()}
    silent = [
        Failure(rank, "killed", f"it {end_of(failed.exitcode)}", "", time.time())
        for rank, failed in failures.items()
        if left[rank] is None and failed.exitcode != -signal.SIGTERM  # with which the agent ends the other ranks
    ]
    return text_of([failure for failure in left.values() if failure is not None], silent)


def _is_wanted(record: logging.LogRecord) -> bool:
    """Whether a line of torch's is to be printed: it is not where Convoy's ranks have left error files."""
    if not str(record.msg).startswith(_PAGES[record.name]):
        return True
    left = [failure for path in _error_files(record) if (failure := read_error_file(path)) is not None]
    if not left:
        return True
    if str(record.msg).startswith("failed") and left[0].attempt < left[0].max_attempts:
        number = f"restart {left[0].attempt + 1} of {left[0].max_attempts}"
        print(f"{text_of(left)}; all ranks start again ({number})", file=sys.stderr, flush=True)
    return False


def _error_files(record: logging.LogRecord) -> Iterator[str]:
    """The error files of the ranks, from the arguments of a log record or the torch object that logs it."""
    if isinstance(record.args, tuple):
        yield from (arg for arg in record.args if isinstance(arg, str) and arg.endswith("error.json"))
    for frame, _ in traceback.walk_stack(sys._getframe()):
        files = getattr(frame.f_locals.get("self"), "error_files", None)
        if isinstance(files, dict):
            yield from files.values()
            return


# `convoy` is c10d that listens on one address (`convoy.launch.rendezvous`); torch's own two listen on all interfaces.
Rendezvous = Literal["convoy", "c10d", "static"]

_HOST = re.compile(r"(?P<bare>[^\[\]:,]+)|\[(?P<six>[0-9a-fA-F:.%\w]+)\]")


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it has."""

    name: str
    devices: int

    @staticmethod
    def parse(text: str, devices: int | None = None) -> "list[Host]":
        """Hosts in a line, as `node1,node2:4,[fe80::1]:2`; `devices` is for those without a number."""
        hosts, names = [], set[str]()
        for part in text.split(","):
            match = re.fullmatch(rf"(?:{_HOST.pattern})(?::(?P<devices>\d+))?", part.strip())
            if match is None or re.search(r"[\s/]", part.strip()):
                raise ConvoyError(f"{part!r} is no host: write e.g. node1,node2:4 (an IPv6 address in brackets)")
            number = int(match["devices"]) if match["devices"] else devices
            if number is None:
                raise ConvoyError(f"{part} says no number of devices: write e.g. {part}:4, or --devices-per-host 4")
            if number < 1:
                raise ConvoyError(f"{part} has {number} devices: write at least 1")
            if match["bare"] in names or match["six"] in names:
                raise ConvoyError(f"host {part} is named twice: write it once, with all of its devices")
            names.add(match["bare"] or match["six"])
            hosts.append(Host(match["bare"] or match["six"], number))
        return hosts


@dataclass(frozen=True)
class Command:
    """A command to start on a host, and the variables that it needs."""

    host: str
    devices: int
    environment: dict[str, str]
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.arguments)])


def commands(
    hosts: Sequence[Host],
    arguments: Sequence[str],
    run_id: str,
    port: int = 29_400,
    rendezvous: Rendezvous = "convoy",
    least: int | None = None,
    max_restarts: int = 0,
    environment: Mapping[str, str] = {},
) -> list[Command]:
    """A command for each of the hosts that train together and meet on the first one. `run_id` is another one for every
    run; `least` hosts are enough to begin and to go on, all by default."""
    count, first = len(hosts), hosts[0].name
    if least is not None and not 1 <= least <= count:
        raise ConvoyError(f"--min-hosts {least} must be from 1 to the {count} hosts that are named")
    if rendezvous == "static" and least not in (None, count):
        raise ConvoyError("--rendezvous static needs all hosts: leave --min-hosts out, or use convoy or c10d")
    endpoint = f"[{first}]:{port}" if ":" in first else f"{first}:{port}"
    meeting = [f"--rdzv-backend={rendezvous}", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run_id}"]
    lines = []
    for number, host in enumerate(hosts):
        if rendezvous == "static":
            meeting = [f"--node-rank={number}", f"--master-addr={first}", f"--master-port={port}"]
        words = [
            "torchrun",
            f"--nnodes={count}" if least in (None, count) else f"--nnodes={least}:{count}",
            f"--nproc-per-node={host.devices}",
            *([f"--max-restarts={max_restarts}"] if max_restarts else []),
            *meeting,
            *("-m", "convoy", "train"),
        ]
        lines.append(Command(host.name, host.devices, dict(environment), (*words, *arguments)))
    return lines
