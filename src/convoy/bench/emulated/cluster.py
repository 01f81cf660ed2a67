"""An emulated cluster as its file describes it: devices, the hosts that they are in, and the links between the hosts.

    devices: {count: 4, speed: 0.5}         # each in a host of its own; with `hosts: 2`, two in each
    links: {rate: 3gbit}

or, where they are unequal,

    devices:
      - {speed: 0.5, host: a}
      - {speed: 0.25, host: b, count: 2}
    links: {rate: 3gbit, hosts: {b: 1gbit}}
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from convoy import units
from convoy.documents import read_mapping
from convoy.errors import ConvoyError
from convoy.files import expanded
from convoy.training.schema import sentence

_SLOWEST = 0.01
MOST = 250  # devices of a cluster
_RATE = re.compile(r"(\d+(?:\.\d+)?)[kmg]bit")
_HOST = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9-]{,61}[a-zA-Z0-9])?")
Number = Annotated[int, Field(ge=1, le=MOST)]
Speed = Annotated[float, Field(ge=_SLOWEST, le=1, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Links(_Section):
    rate: str = ""
    hosts: dict[str, str] = {}


class _Alike(_Section):
    count: Number
    speed: Speed = 1.0  # the share of a core that each has
    hosts: Number | None = None


class _Listed(_Section):
    speed: Speed = 1.0
    host: str | None = None  # one of its own where none is named
    count: Number = 1


@dataclass(frozen=True)
class ClusterDevice:
    """One of a cluster: its share of a core, up to 1, and the name of its host."""

    speed: float
    host: str


@dataclass(frozen=True)
class Cluster:
    """Devices in hosts that a switch joins; device `i` is for rank `i`.

    Devices in one host talk through the memory of that host, all others through the links of their hosts.
    """

    devices: tuple[ClusterDevice, ...]
    rate: str = ""  # of each host's link, either way, for `tc`: `300mbit`; empty for one host, or where `rates` has all
    rates: Mapping[str, str] = field(default_factory=dict, hash=False)  # by host, of links with another rate

    def __post_init__(self) -> None:
        if not self.devices:
            raise ConvoyError("a cluster has at least one device: write e.g. `devices: {count: 4, speed: 0.5}`")
        if len(self.devices) > MOST:
            raise ConvoyError(f"a cluster of {len(self.devices)} devices is not emulated: write at most {MOST}")
        for number, device in enumerate(self.devices):
            if not _HOST.fullmatch(device.host):
                raise ConvoyError(f"device {number} has the host {device.host!r}: use letters, digits and hyphens")
        for host in self.rates:
            if host not in self.hosts:
                raise ConvoyError(f"a link is given for {host!r}, but the hosts are {', '.join(self.hosts)}: name one")
        for rate in (*self.rates.values(), *([] if self.rate == "" else [self.rate])):
            match = _RATE.fullmatch(rate) if isinstance(rate, str) else None
            if match is None or float(match[1]) == 0:  # `tc` would not take it, or for something else
                raise ConvoyError(f"the rate of a link is {rate!r}: write e.g. 1gbit or 300mbit")
        missing = [host for host in self.hosts if host not in self.rates]
        if not self.rate and missing and len(self.hosts) > 1:
            raise ConvoyError(f"the link of host {missing[0]} has no rate: write e.g. `links: {{rate: 3gbit}}`")

    @staticmethod
    def alike(
        count: int, speed: float = 1.0, rate: str = "", hosts: int | None = None, rates: Mapping[str, str] | None = None
    ) -> "Cluster":
        """Devices of one speed, consecutive ones in each of some hosts, or each in one of its own."""
        hosts = count if hosts is None else hosts
        if not 1 <= hosts <= count:
            raise ConvoyError(f"{count} devices cannot be in {hosts} hosts: write from 1 to {count} hosts")
        devices = (ClusterDevice(speed, f"host{number * hosts // count}") for number in range(count))
        return Cluster(tuple(devices), rate, rates or {})

    @staticmethod
    def read(path: str | Path) -> "Cluster":
        """The cluster in a YAML file; a ConvoyError names the file."""
        document = read_mapping(expanded(path), "cluster")
        devices = document.get("devices")
        if devices is None or (isinstance(devices, dict) and "count" not in devices):
            form = "write e.g. `devices: {count: 4, speed: 0.5}` and below it `links: {rate: 3gbit}`"
            raise ConvoyError(f"{path}: a cluster needs devices and their count: {form}")
        kind = _ListedDevices if isinstance(devices, list) else _AlikeDevices
        try:
            return kind.model_validate(document).cluster
        except ValidationError as error:
            raise ConvoyError(f"{path}: {sentence(error, kind)}") from error
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
        speeds, rates = [f"{device.speed:g}" for device in self.devices], [self.rate_of(host) for host in self.hosts]
        said = f"{units.plural(len(speeds), 'device')} with {', '.join(speeds)} of a core"
        if len(speeds) > 1 and len(set(speeds)) == 1:
            said = f"{len(speeds)} devices with {speeds[0]} of a core each"
        if len(self.hosts) == 1:
            return f"{said} in one host"
        links = rates[0] if len(set(rates)) == 1 else ", ".join(rates)
        return f"{said} in {len(rates)} hosts, links of {links}"


class _AlikeDevices(_Section):
    devices: _Alike
    links: _Links = _Links()

    @property
    def cluster(self) -> Cluster:
        return Cluster.alike(**dict(self.devices), rate=self.links.rate, rates=self.links.hosts)


class _ListedDevices(_Section):
    devices: list[_Listed]
    links: _Links = _Links()

    @property
    def cluster(self) -> Cluster:
        listed = [entry for entry in self.devices for _ in range(entry.count)]
        hosts = (f"host{number}" if entry.host is None else entry.host for number, entry in enumerate(listed))
        devices = tuple(ClusterDevice(entry.speed, host) for entry, host in zip(listed, hosts, strict=True))
        return Cluster(devices, self.links.rate, self.links.hosts)
