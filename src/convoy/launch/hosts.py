"""The commands that start one run on several hosts, through torchrun."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


def commands(
    hosts: Sequence[Host],
    arguments: Sequence[str],
    run_id: str,
    port: int = 29_400,
    rendezvous: Rendezvous = "convoy",
    least: int | None = None,
    max_restarts: int = 0,
    interface: str | None = None,
    secret: Mapping[str, str] = {},
) -> list[Command]:
    """A command for each of the hosts that train together, with the arguments of `convoy train`.

    They meet on the first host, at a port; `run_id` is the same on all of them, and another one for every run. `least`
    hosts are enough to begin and to go on, all by default; ranks start again `max_restarts` times when one has failed,
    and talk through an interface, by default the one on the way to the first host. `secret` has the variables with the
    secret by which the hosts know each other, or with its file.
    """
    count, first = len(hosts), hosts[0].name
    if least is not None and not 1 <= least <= count:
        raise ConvoyError(f"--min-hosts {least} must be from 1 to the {count} hosts that are named")
    if rendezvous == "static" and least not in (None, count):
        raise ConvoyError("--rendezvous static needs all hosts: leave --min-hosts out, or use convoy or c10d")
    environment = dict.fromkeys(interfaces.VARIABLES, interface) if interface is not None else {}
    environment |= secret if count > 1 else {}
    endpoint = f"[{first}]:{port}" if ":" in first else f"{first}:{port}"
    meeting = [f"--rdzv-backend={rendezvous}", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run_id}"]
    result = []
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
        result.append(Command(host, (*words, *arguments), environment))
    return result
