"""What is emulated: devices, the hosts that they are in, and the links that join the hosts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from convoy.errors import ConvoyError
from convoy.files import expanded
from convoy.launch.emulated.device import MOST, Device, alike, check_rate, check_speed
from convoy.launch.emulated.document import parse, read_yaml

_HOST = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?")


@dataclass(frozen=True)
class Cluster:
    """Devices in hosts that a switch joins; device `i` is for rank `i`.

    Devices in one host talk through the memory of that host, all others through the links of their hosts.

    Attributes:
        devices: at least one.
        rate: of the link of a host to the switch, in each direction, in the words of `tc`: `3gbit`, `300mbit`. It may
            be empty where there is one host only, or where `rates` has all.
        rates: by name of the host, where a link has another rate.

    Raises:
        ConvoyError: speeds, names or rates that cannot be.
    """

    devices: tuple[Device, ...]
    rate: str = ""
    rates: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.devices:
            raise ConvoyError("a cluster has at least one device: write e.g. `devices: {count: 4, speed: 0.5}`")
        if len(self.devices) > MOST:
            raise ConvoyError(f"a cluster of {len(self.devices)} devices is not emulated: write at most {MOST}")
        for number, device in enumerate(self.devices):
            check_speed(device.speed, f"device {number}")
            if not _HOST.fullmatch(device.host) or len(device.host) > 63:
                raise ConvoyError(f"device {number} has the host {device.host!r}: use letters, digits and hyphens")
        for host, rate in self.rates.items():
            if host not in self.hosts:
                raise ConvoyError(f"a link is given for {host!r}, but the hosts are {', '.join(self.hosts)}: name one")
            check_rate(rate)
        if self.rate:
            check_rate(self.rate)
        missing = [host for host in self.hosts if host not in self.rates]
        if not self.rate and missing and len(self.hosts) > 1:
            raise ConvoyError(f"the link of host {missing[0]} has no rate: write e.g. `links: {{rate: 3gbit}}`")

    @staticmethod
    def alike(count: int, speed: float = 1.0, rate: str = "", hosts: int | None = None) -> "Cluster":
        """A cluster of devices that are alike.

        Args:
            count: of the devices.
            speed: of each, as a share of a core.
            rate: of all links.
            hosts: how many there are, with consecutive devices in each; None for one for each device.

        Raises:
            ConvoyError: there is no such cluster.
        """
        return Cluster(alike(count, speed, hosts), rate)

    @staticmethod
    def read(path: str | Path) -> "Cluster":
        """The cluster in a YAML file.

        Raises:
            ConvoyError: it cannot be read or is no cluster; the sentence has the file.
        """
        document = read_yaml(expanded(path))
        try:
            return Cluster(*parse(document))
        except ConvoyError as error:
            raise ConvoyError(f"{path}: {error}") from error

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts, in the order of their first devices."""
        return tuple(dict.fromkeys(device.host for device in self.devices))

    def rate_of(self, host: str) -> str:
        """The rate of the link of a host; empty for as fast as the machine can."""
        return self.rates.get(host, self.rate)

    def __str__(self) -> str:
        """In one line."""
        speeds = [device.speed for device in self.devices]
        rates = [self.rate_of(host) for host in self.hosts]
        if len(speeds) == 1:
            said = f"1 device with {speeds[0]:g} of a core"
        elif len(set(speeds)) == 1:
            said = f"{len(speeds)} devices with {speeds[0]:g} of a core each"
        else:
            said = f"{len(speeds)} devices with {', '.join(f'{speed:g}' for speed in speeds)} of a core"
        if len(rates) == 1:
            return f"{said} in one host"
        links = rates[0] if len(set(rates)) == 1 else ", ".join(rates)
        return f"{said} in {len(rates)} hosts, links of {links}"
