"""Hosts that are network namespaces on a switch, and devices that are control groups with a share of a core.

The switch is a bridge in a namespace of its own, so that nothing is seen of it outside. Both ends of every link are
shaped by a token bucket, so a host neither sends nor receives faster. Needs root, `ip` and `tc`. Control groups are of
version 1 or 2 of Linux's. Names say which process made something, so that what a killed one left behind can be told
and removed.
"""

import contextlib
import ctypes
import itertools
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from convoy import resources
from convoy.errors import ConvoyError

_NAME = re.compile(r"convoy-(\d+)-(\d+)-\d+-[a-z]+\d*")
_numbers = itertools.count()


def prefix() -> str:
    """The beginning of all names of one emulation: the number and the start time of this process."""
    pid = os.getpid()
    return f"convoy-{pid}-{_started(pid)}-{next(_numbers)}-"


def is_left(name: str) -> bool:
    """Whether something is Convoy's and the process that made it is gone."""
    match = _NAME.fullmatch(name)
    return match is not None and _started(int(match[1])) != int(match[2])


def _started(pid: int) -> int:
    """When a process started, in ticks since the machine did; -1 where there is none. Numbers of processes recur."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return -1
    state, *rest = text.rpartition(")")[2].split()
    return -1 if state == "Z" else int(rest[18])


INTERFACE = "eth0"
# Bytes that an idle link lets through at once. With less than a segment of 64 kB and its headers Linux would cut each
# to packets, which takes the sender's whole core.
BURST = "80kb"
QUEUE = "50ms"
_FOLDER = Path("/run/netns")
_NEW_NETWORK = 0x40000000


@dataclass(frozen=True)
class EmulatedHost:
    """A host of the cluster."""

    namespace: str  # name of its network namespace
    address: str  # reached from the other hosts only

    def enter(self) -> None:
        """Let the calling thread, and all that it starts, use this host's network."""
        with (_FOLDER / self.namespace).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def made_hosts(prefix: str, rates: Mapping[str, str]) -> Iterator[dict[str, EmulatedHost]]:
    """Hosts by name, joined by links, gone when the context is left; an empty rate is as fast as can be."""
    switch = f"{prefix}switch"
    hosts = {name: EmulatedHost(f"{prefix}host{place}", f"10.213.0.{place + 1}") for place, name in enumerate(rates)}
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for place, (name, host) in enumerate(hosts.items()):
            _connect(host, switch, f"port{place}", rates[name])
        yield hosts
    finally:
        for space in (*(host.namespace for host in hosts.values()), switch):
            _delete(space)


def sweep() -> None:
    """Remove what a process that was killed has left behind."""
    for path in _FOLDER.glob("convoy-*"):
        if is_left(path.name):
            _delete(path.name)
    with contextlib.suppress(ConvoyError):
        for group in Hierarchy.find().folder.glob("convoy-*"):
            if is_left(group.name):
                _remove(group, patience=0.0)


def _connect(host: EmulatedHost, switch: str, port: str, rate: str) -> None:
    space = host.namespace
    _run("ip", "netns", "add", space)
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", space)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", space, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    _run("ip", "-n", space, "link", "set", INTERFACE, "up")
    _run("ip", "-n", space, "link", "set", "lo", "up")
    for where, device in ((space, INTERFACE), (switch, port)) if rate else ():
        shape = ("root", "tbf", "rate", rate, "burst", BURST, "latency", QUEUE)
        _run("tc", "-n", where, "qdisc", "add", "dev", device, *shape)


def _run(*command: str) -> None:
    process = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if process.returncode:
        reason = (process.stderr or process.stdout).strip()
        raise ConvoyError(f"emulated hosts cannot be made here, {' '.join(command)} says: {reason}")


def _delete(name: str) -> None:
    if (_FOLDER / name).exists():
        subprocess.run(("ip", "netns", "delete", name), capture_output=True, timeout=20, check=False)


PERIOD_S = 0.004  # in each period a group may run for its share of it
_LEAST_S = 0.001  # that Linux gives
_PATIENCE_S = 1.0


@dataclass(frozen=True)
class Hierarchy:
    """Where groups are made."""

    folder: Path  # the group within which others are
    version: int  # of control groups, 1 or 2

    @staticmethod
    def find() -> "Hierarchy":
        """The one that has the controller of processor time; of version 1 the group of this process, so that limits of
        those around it hold too, and that around an emulated device where this process is on one."""
        for folder, version in resources.folders("cpu"):
            is_mount = version == 2 and folder == resources.ROOT and "cpu" in _words(folder / "cgroup.controllers")
            if is_mount or (version == 1 and folder.is_dir() and "/convoy-" not in str(folder)):
                return Hierarchy(folder, version)
        raise ConvoyError(
            "a device cannot have a share of a core here, because Linux's control groups (cgroups) with the "
            "controller cpu are not mounted: give every device the speed 1, or mount them"
        )

    def make(self, name: str, share: float) -> Path:
        """A group with a share of a core."""
        period = round(max(PERIOD_S, _LEAST_S / share) * 1e6)
        quota = round(period * share)
        group = self.folder / name
        files = {"cpu.max": f"{quota} {period}"}
        if self.version == 1:
            files = {"cpu.cfs_period_us": str(period), "cpu.cfs_quota_us": str(quota)}
        try:
            if self.version == 2 and "cpu" not in _words(self.folder / "cgroup.subtree_control"):
                (self.folder / "cgroup.subtree_control").write_text("+cpu", encoding="ascii")
            group.mkdir()
            for name, text in files.items():
                (group / name).write_text(text, encoding="ascii")
        except OSError as error:
            if group.is_dir():
                group.rmdir()
            raise ConvoyError(
                f"a device cannot have a share of a core here ({error}): run this as root outside of a container, "
                "or give every device the speed 1"
            ) from error
        return group


@contextmanager
def made_groups(prefix: str, shares: Sequence[float]) -> Iterator[list[Path | None]]:
    """A group for each share of a core, gone when the context is left; none for a whole core.

    Processes that are still there then are given back to the group around.
    """
    hierarchy = Hierarchy.find() if any(share < 1 for share in shares) else None
    made: list[Path | None] = []
    try:
        for number, share in enumerate(shares):
            made.append(None if share == 1 or hierarchy is None else hierarchy.make(f"{prefix}device{number}", share))
        yield made
    finally:
        for group in made:
            if group is not None:
                _remove(group)


def _remove(group: Path, patience: float = _PATIENCE_S) -> None:
    """Remove a group; processes that do not end in time go to the one around."""
    until = time.monotonic() + patience
    while group.is_dir():
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        if time.monotonic() > until + 1:
            return
        if time.monotonic() > until:
            for process in _words(group / "cgroup.procs"):
                with contextlib.suppress(OSError):
                    (group.parent / "cgroup.procs").write_text(process, encoding="ascii")
        time.sleep(0.01)


def _words(path: Path) -> list[str]:
    return resources.text_of(path).split()
