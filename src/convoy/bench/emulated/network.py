"""Hosts that are network namespaces on a switch, behind links of a given rate.

The switch is a bridge in a namespace of its own, so that nothing is seen of it outside. Both ends of every link are
shaped by a token bucket, so a host neither sends nor receives faster. Needs root, `ip` and `tc`. Names say which
process made something, so that what a killed one left behind can be told and removed.
"""

import ctypes
import itertools
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
        try:
            with (_FOLDER / self.namespace).open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
                    number = ctypes.get_errno()
                    raise OSError(number, os.strerror(number))
        except OSError as error:
            raise ConvoyError(
                f"the emulated host {self.namespace} cannot be entered ({error.strerror}): "
                "enter it as root, before its cluster is removed"
            ) from error


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ConvoyError(f"emulated hosts cannot be made here, {' '.join(command)} says: {said}")


def _delete(name: str) -> None:
    if (_FOLDER / name).exists():
        subprocess.run(("ip", "netns", "delete", name), capture_output=True, timeout=20, check=False)
