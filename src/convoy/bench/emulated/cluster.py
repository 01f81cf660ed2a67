"""An emulated cluster as its file describes it: devices, the hosts that they are in, and the links between the hosts.

    devices: {count: 4, speed: 0.5}         # each in a host of its own; with `hosts: 2`, two in each
    links: {rate: 3gbit}

or, where they are unequal,

    devices:
      - {speed: 0.5, host: a}
      - {speed: 0.25, host: b, count: 2}
    links: {rate: 3gbit, hosts: {b: 1gbit}}
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convoy import documents, units
from convoy.errors import ConvoyError
from convoy.files import expanded, read_text

_SLOWEST = 0.01
MOST = 250  # devices of a cluster
_RATE = re.compile(r"(\d+(?:\.\d+)?)[kmg]bit")
_HOST = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9-]{,61}[a-zA-Z0-9])?")
_FORM = "write e.g. `devices: {count: 4, speed: 0.5}` and below it `links: {rate: 3gbit}`"


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
            _check_speed(device.speed, f"device {number}")
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
        if not 1 <= count <= MOST:
            raise ConvoyError(f"a cluster of {count} devices is not emulated: write a count from 1 to {MOST}")
        hosts = count if hosts is None else hosts
        if not 1 <= hosts <= count:
            raise ConvoyError(f"{count} devices cannot be in {hosts} hosts: write from 1 to {count} hosts")
        devices = (ClusterDevice(speed, f"host{number * hosts // count}") for number in range(count))
        return Cluster(tuple(devices), rate, rates or {})

    @staticmethod
    def read(path: str | Path) -> "Cluster":
        """The cluster in a YAML file; a ConvoyError names the file."""
        document = documents.parse(read_text(expanded(path), "cluster"), str(path))
        try:
            return _parse(document)
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


def _parse(document: Any) -> Cluster:
    if not isinstance(document, Mapping):
        raise ConvoyError(f"a cluster has the keys devices and links: {_FORM}")
    _check_keys(document, "a cluster", "devices", "links")
    devices, links = document.get("devices"), document.get("links")
    if devices is None:
        raise ConvoyError(f"devices is missing: {_FORM}")
    rate, rates = _links({} if links is None else links)
    if isinstance(devices, list):
        return Cluster(tuple(_listed(devices)), rate, rates)
    if not isinstance(devices, Mapping):
        raise ConvoyError(
            f"devices is {devices!r}: write e.g. `devices: {{count: 4, speed: 0.5}}`, or a list of devices"
        )
    _check_keys(devices, "devices", "count", "speed", "hosts")
    if "count" not in devices:
        raise ConvoyError("devices has no count: write e.g. `devices: {count: 4, speed: 0.5}`")
    count = _whole(devices["count"], "count of devices")
    hosts = _whole(devices["hosts"], "number of hosts") if "hosts" in devices else None
    return Cluster.alike(count, _check_speed(devices.get("speed", 1.0), "the devices"), rate, hosts, rates)


def _listed(entries: list[Any]) -> Iterator[ClusterDevice]:
    """Devices one by one; those that name no host are in one of their own."""
    made = 0
    for number, entry in enumerate(entries, 1):
        what = f"entry {number} of devices"
        if not isinstance(entry, Mapping):
            raise ConvoyError(f"{what} is {entry!r}: write e.g. `- {{speed: 0.5, host: a}}`")
        _check_keys(entry, what, "speed", "host", "count")
        speed, host = _check_speed(entry.get("speed", 1.0), what), entry.get("host")
        for _ in range(_whole(entry.get("count", 1), f"count in {what}")):
            yield ClusterDevice(speed, f"host{made}" if host is None else str(host))
            made += 1


def _links(links: Any) -> tuple[str, dict[str, str]]:
    """The rate of all links, and of those of hosts that have another."""
    if not isinstance(links, Mapping):
        raise ConvoyError(f"links is {links!r}: write e.g. `links: {{rate: 3gbit}}`")
    if "latency" in links:
        raise ConvoyError(
            "links has a latency, which is not emulated (links have what the machine's own network stack takes): "
            "leave latency out"
        )
    _check_keys(links, "links", "rate", "hosts")
    rate, hosts = links.get("rate"), links.get("hosts") or {}
    if not isinstance(hosts, Mapping):
        raise ConvoyError(f"hosts of links is {hosts!r}: write a rate for each host, e.g. `hosts: {{b: 1gbit}}`")
    return "" if rate is None else rate, {str(host): given for host, given in hosts.items()}


def _check_keys(mapping: Mapping[Any, Any], what: str, *keys: str) -> None:
    for key in mapping:
        if key not in keys:
            close = difflib.get_close_matches(str(key), keys, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(keys)}"
            raise ConvoyError(f"{what} has no key {key!r}: {hint}")


def _check_speed(speed: Any, what: str) -> float:
    number = isinstance(speed, int | float) and not isinstance(speed, bool)
    if not number or not math.isfinite(speed) or not _SLOWEST <= speed <= 1:
        raise ConvoyError(
            f"the speed of {what} is {speed!r}: write the share of a core that it has, from {_SLOWEST} to 1"
        )
    return float(speed)


def _whole(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConvoyError(f"the {what} is {value!r}: write a whole number from 1")
    return value
