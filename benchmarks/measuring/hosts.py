"""Hosts that are emulated on one Linux machine: network namespaces on a switch, behind links of a given rate.

    with emulated_hosts(2, "1gbit") as hosts:
        ...                                    # in a process: hosts[0].enter(), then gloo over hosts[0].interface

The switch is a bridge in a namespace of its own, so that nothing is seen of it outside. Both ends of every link are
shaped by a token bucket, so a host neither sends nor receives faster. Needs root, `ip` and `tc`.
"""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from convoy.errors import ConvoyError

_FOLDER = Path("/run/netns")
_NAME = re.compile(r"convoy-(\d+)-(?:host\d+|switch)")
_NEW_NETWORK = 0x40000000
_INTERFACE = "eth0"
BURST = "128kb"
LATENCY = "50ms"


@dataclass(frozen=True)
class Host:
    """One of them.

    Attributes:
        namespace: name of its network namespace.
        address: reached from the other hosts only.
        interface: on which it is.
    """

    namespace: str
    address: str
    interface: str = _INTERFACE

    def enter(self) -> None:
        """Let the calling thread, and all that it starts, use this host's network."""
        with (_FOLDER / self.namespace).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
                number = ctypes.get_errno()
                raise OSError(number, f"setns to {self.namespace}: {os.strerror(number)}")


@contextmanager
def emulated_hosts(num: int, rate: str) -> Iterator[list[Host]]:
    """Hosts joined by links of `rate`, gone when the context is left.

    Args:
        num: how many.
        rate: of each link in each direction, in the words of `tc`: `1gbit`, `300mbit`.

    Raises:
        ConvoyError: this process may not make them, or a tool is missing.
    """
    check_rate(rate)
    _check_rights()
    sweep()
    prefix = f"convoy-{os.getpid()}-"
    switch = f"{prefix}switch"
    hosts = [Host(f"{prefix}host{place}", f"10.213.0.{place + 1}") for place in range(num)]
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for place, host in enumerate(hosts):
            _connect(host, switch, f"port{place}", rate)
        yield hosts
    finally:
        for name in (*(host.namespace for host in hosts), switch):
            _delete(name)


def sweep() -> None:
    """Remove what a process that was killed has left behind."""
    for path in _FOLDER.glob("convoy-*"):
        match = _NAME.fullmatch(path.name)
        if match and not Path("/proc", match[1]).exists():
            _delete(path.name)


def check_rate(rate: str) -> None:
    """Refuse what `tc` would not take, or would take for bits a second."""
    if not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", rate):
        raise ConvoyError(f"the rate of a link is {rate!r}: write e.g. 1gbit or 300mbit")


def _connect(host: Host, switch: str, port: str, rate: str) -> None:
    space = host.namespace
    _run("ip", "netns", "add", space)
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", host.interface, "netns", space)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _run("ip", "-n", space, "address", "add", f"{host.address}/24", "dev", host.interface)
    _run("ip", "-n", space, "link", "set", host.interface, "up")
    _run("ip", "-n", space, "link", "set", "lo", "up")
    for where, device in ((space, host.interface), (switch, port)):
        shape = ("root", "tbf", "rate", rate, "burst", BURST, "latency", LATENCY)
        _run("tc", "-n", where, "qdisc", "add", "dev", device, *shape)


def _check_rights() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ConvoyError(f"emulated hosts need {' and '.join(missing)}: install the package iproute2")
    if os.geteuid() != 0:
        raise ConvoyError("emulated hosts are network namespaces, which only root can make: run this as root")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise ConvoyError(f"emulated hosts cannot be made here, {' '.join(command)} says: {said}")


def _delete(name: str) -> None:
    if (_FOLDER / name).exists():
        subprocess.run(("ip", "netns", "delete", name), capture_output=True, timeout=20, check=False)
