"""The commands that start one run on several hosts, through torchrun."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from convoy import interfaces
from convoy.errors import ConvoyError

# `convoy` is c10d that listens on one address (`convoy.launch.torchrun`); torch's own two listen on all interfaces.
Rendezvous = Literal["convoy", "c10d", "static"]

_HOST = re.compile(r"(?P<bare>[^\[\]:,]+)|\[(?P<six>[0-9a-fA-F:.%\w]+)\]")


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it has."""

    name: str
    devices: int

    @staticmethod
    def parse(text: str, devices: int | None = None) -> "list[Host]":
        """Hosts in a line, those of IPv6 in brackets: `node1,node2:4,[fe80::1]:2`; `devices` is for those without a
        number."""
        hosts = []
        for part in text.split(","):
            match = re.fullmatch(rf"(?:{_HOST.pattern})(?::(?P<devices>\d+))?", part.strip())
            if match is None or re.search(r"[\s/]", part.strip()):
                raise ConvoyError(f"{part!r} is no host: write e.g. node1,node2:4 (an IPv6 address in brackets)")
            number = int(match["devices"]) if match["devices"] else devices
            if number is None:
                raise ConvoyError(f"{part} says no number of devices: write e.g. {part}:4, or --devices-per-host 4")
            if number < 1:
                raise ConvoyError(f"{part} has {number} devices: write at least 1")
            hosts.append(Host(match["bare"] or match["six"], number))
        names = [host.name for host in hosts]
        repeated_name = next((name for name in names if names.count(name) > 1), None)
        if repeated_name is not None:
            raise ConvoyError(f"host {repeated_name} is named twice: write {repeated_name}:N with all of its devices")
        return hosts


@dataclass(frozen=True)
class Command:
    """A command to start on a host, and the variables that it needs."""

    host: Host
    arguments: tuple[str, ...]
    environment: dict[str, str]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.arguments)])


@dataclass(frozen=True)
class HostGroup:
    """Hosts that train together."""

    hosts: Sequence[Host]  # the first one is where they meet
    run_id: str  # the same on all of them, and another one for every run
    port: int = 29_400  # of the first host
    rendezvous: Rendezvous = "convoy"
    least: int | None = None  # hosts that are enough to begin and to go on; None for all
    max_restarts: int = 0  # of the ranks when one has failed
    interface: str | None = None  # of every host, for the ranks; None for the one on the way to the first host
    # variables with the secret by which the hosts know each other, or with its file
    secret: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.hosts)
        if self.least is not None and not 1 <= self.least <= count:
            raise ConvoyError(f"--min-hosts {self.least} must be from 1 to the {count} hosts that are named")
        if self.rendezvous == "static" and self.least not in (None, count):
            raise ConvoyError("--rendezvous static needs all hosts: leave --min-hosts out, or use convoy or c10d")
        if not 0 < self.port < 1 << 16:
            raise ConvoyError(f"--port {self.port} must be from 1 to 65535")
        if self.max_restarts < 0:
            raise ConvoyError(f"--max-restarts {self.max_restarts} must be 0 or more")
        if self.interface is not None:
            interfaces.check_name(self.interface)

    def commands(self, arguments: Sequence[str]) -> list[Command]:
        """A command for each host, with the arguments of `convoy train`."""
        environment = dict.fromkeys(interfaces.VARIABLES, self.interface) if self.interface is not None else {}
        environment |= self.secret if len(self.hosts) > 1 else {}
        return [
            Command(host, (*self._torchrun(number), "-m", "convoy", "train", *arguments), environment)
            for number, host in enumerate(self.hosts)
        ]

    def _torchrun(self, number: int) -> list[str]:
        count, least = len(self.hosts), self.least or len(self.hosts)
        words = ["torchrun", f"--nnodes={count}" if least == count else f"--nnodes={least}:{count}"]
        words.append(f"--nproc-per-node={self.hosts[number].devices}")
        if self.max_restarts:
            words.append(f"--max-restarts={self.max_restarts}")
        first = self.hosts[0].name
        if self.rendezvous == "static":
            return [*words, f"--node-rank={number}", f"--master-addr={first}", f"--master-port={self.port}"]
        endpoint = f"[{first}]:{self.port}" if ":" in first else f"{first}:{self.port}"
        meeting = [f"--rdzv-backend={self.rendezvous}", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={self.run_id}"]
        return [*words, *meeting]
