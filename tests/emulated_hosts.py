"""Hosts for tests: network namespaces with addresses, names and links of their own, and processes in them."""

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from convoy.bench import namespaces
from convoy.bench.namespaces import prefix
from convoy.errors import ConvoyError

# $1 is the host's name and $2 a file with the names of all; both are seen in there only.
_ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class TestHost:
    """One of them, on 10.213.0.0/24 by eth0."""

    __test__ = False
    name: str
    namespace: str
    address: str
    names: Path

    def start(self, command: list[str], **options: Any) -> subprocess.Popen:
        """A process there, which ends with this one."""
        return subprocess.Popen(self._inside(command), preexec_fn=_end_with_parent, **options)

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """A process there, to its end."""
        fixed = {"capture_output": True, "text": True, "timeout": 150, "check": False}
        return subprocess.run(self._inside(command), **(fixed | options))

    def pids(self) -> list[int]:
        """Processes that are there."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        return [int(word) for word in found.stdout.split()]

    def _inside(self, command: list[str]) -> list[str]:
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts", "--mount"]
        return [*enter, "sh", "-c", _ENTER, "enter", self.name, str(self.names), *command]


@contextmanager
def emulated_hosts(num_hosts: int, rate: str = "") -> Iterator[list[TestHost]]:
    """Hosts node0, node1, … that know each other's names; all that runs there is killed when the context is left."""
    if os.geteuid() != 0:
        pytest.skip("emulated hosts are network namespaces, which only root can make")
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"emulated hosts need {', '.join(missing)}: install iproute2 and util-linux")
    with tempfile.TemporaryDirectory(prefix="convoy-hosts-") as folder:
        names = Path(folder) / "hosts"
        made = namespaces.made_hosts(prefix(), {f"node{number}": rate for number in range(num_hosts)})
        try:
            spaces = made.__enter__()
        except ConvoyError as error:
            pytest.skip(str(error))
        hosts = [TestHost(name, host.namespace, host.address, names) for name, host in spaces.items()]
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in hosts))
        try:
            if hosts[0].run(["true"]).returncode:
                pytest.skip("namespaces of names and mounts cannot be made here")
            yield hosts
        finally:
            for host in hosts:
                for pid in host.pids():
                    os.kill(pid, signal.SIGKILL)
            made.__exit__(None, None, None)


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Addresses and ports on which processes listen for TCP, as the kernel has them (IPv6 as hexadecimal digits)."""
    found = set()
    for pid in pids:
        try:
            entries = list(Path(f"/proc/{pid}/fd").iterdir())
            own = {str(entry.readlink()) for entry in entries if entry.is_symlink()}
            tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
        except OSError:
            continue
        for line in (line.split() for table in tables for line in table.splitlines()[1:]):
            if line[3] == "0A" and f"socket:[{line[9]}]" in own:
                digits, _, port = line[1].partition(":")
                address = ".".join(map(str, bytes.fromhex(digits)[::-1])) if len(digits) == 8 else digits
                found.add((address, int(port, 16)))
    return found


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
