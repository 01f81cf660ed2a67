"""Emulates a cluster on one Linux machine: devices with a share of a core each, hosts that only a link joins.

cluster = Cluster.read("four.yaml")
with emulate(cluster) as places:
    ...                                # in the process of a rank, before torch starts threads:
    places[rank]()

docs/emulation.md describes its file: devices, the hosts that they are in, and the links between the hosts.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from convoy import resources, units
from convoy.bench import namespaces
from convoy.bench.namespaces import INTERFACE, EmulatedHost, prefix
from convoy.documents import read_mapping
from convoy.errors import ConvoyError
from convoy.files import expanded
from convoy.recipe.schema import sentence
from convoy.resources import own_cores

_SLOWEST = 0.01
MOST = 250  # devices of a cluster
_RATE = re.compile(r"(\d+(?:\.\d+)?)[kmg]bit")
_HOST = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9-]{,61}[a-zA-Z0-9])?")
Number = Annotated[int, Field(ge=1, le=MOST)]
Speed = Annotated[float, Field(ge=_SLOWEST, le=1, allow_inf_nan=False)]
_Devices = TypeVar("_Devices")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Links(_Section):
    rate: str = ""
    hosts: dict[str, str] = {}


class _Alike(_Section):
    count: Number
    speed: Speed = 1.0  # the share of a core that each has
    hosts: Number | None = None  # that hold consecutive devices; as many as devices where not said


class _Listed(_Section):
    speed: Speed = 1.0
    host: str | None = None  # one of its own where none is named
    count: Number = 1


class _Described(_Section, Generic[_Devices]):
    devices: _Devices
    links: _Links = _Links()


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
        for mistake in self._mistakes():
            raise ConvoyError(mistake)

    def _mistakes(self) -> Iterator[str]:
        if not self.devices:
            yield "a cluster has at least one device: write e.g. `devices: {count: 4, speed: 0.5}`"
        if len(self.devices) > MOST:
            yield f"a cluster of {len(self.devices)} devices is not emulated: write at most {MOST}"
        for number, device in enumerate(self.devices):
            if not _HOST.fullmatch(device.host):
                yield f"device {number} has the host {device.host!r}: use letters, digits and hyphens"
        for host in self.rates:
            if host not in self.hosts:
                yield f"a link is given for {host!r}, but the hosts are {', '.join(self.hosts)}: name one"
        for rate in (*self.rates.values(), *([] if self.rate == "" else [self.rate])):
            match = _RATE.fullmatch(rate) if isinstance(rate, str) else None
            if match is None or float(match[1]) == 0:  # `tc` would not take it, or for something else
                yield f"the rate of a link is {rate!r}: write e.g. 1gbit or 300mbit"
        without = [host for host in self.hosts if not self.rate_of(host)]
        if without and len(self.hosts) > 1:
            yield f"the link of host {without[0]} has no rate: write e.g. `links: {{rate: 3gbit}}`"

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
        kind = _Described[list[_Listed]] if isinstance(devices, list) else _Described[_Alike]
        try:
            content = kind.model_validate(document)
            links = content.links
            if isinstance(content.devices, _Alike):
                return Cluster.alike(**dict(content.devices), rate=links.rate, rates=links.hosts)
            listed = [entry for entry in content.devices for _ in range(entry.count)]
            hosts = (f"host{number}" if entry.host is None else entry.host for number, entry in enumerate(listed))
            places = (ClusterDevice(entry.speed, host) for entry, host in zip(listed, hosts, strict=True))
            return Cluster(tuple(places), links.rate, links.hosts)
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
        speeds = ", ".join(f"{device.speed:g}" for device in self.devices)
        devices = f"{units.plural(len(self.devices), 'device')} with {speeds} of a core"
        if len(self.hosts) == 1:
            return f"{devices} in one host"
        return f"{devices} in {len(self.hosts)} hosts, links of {', '.join(map(self.rate_of, self.hosts))}"


PORT = 29_500
# Wakes a core every millisecond, so that Linux looks how long groups with a share of it have run. Otherwise it looks
# when its clock ticks, every 4 ms as a rule: a device of half a core would compute for 4 or 8 ms at the speed of a
# whole one, and then not at all. This takes about one percent of the core, and ends with its parent.
_PULSE = """
import contextlib, ctypes, os, signal, sys, time
core, parent = map(int, sys.argv[1:])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.sched_setaffinity(0, {core})
with contextlib.suppress(OSError):  # without, it wakes a little late
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
while os.getppid() == parent:
    time.sleep(0.001)
"""


@dataclass(frozen=True)
class EmulatedDevice:
    """An emulated device, for the process of one rank."""

    rank: int
    host: EmulatedHost
    master: str  # address of the host of device 0
    core: int  # of this machine, on which the process runs
    group: Path | None  # the control group that limits it; None where it has the whole core

    def __call__(self) -> None:
        """Put the calling process here, for good: in the host's network, with the share of its core and `environment`.

        To be called before torch starts threads, by a process of the user root. All threads of the process together
        have the share, those of gloo too.
        """
        try:
            if self.group is not None:
                (self.group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
            self.host.enter()
        except OSError as error:
            raise ConvoyError(
                f"the emulated device {self.rank} cannot be entered ({error}): enter it as root, before its cluster is "
                "removed"
            ) from error
        resources.pin([self.core])
        # gloo's thread tries again and again for a lock that the thread which it has just pushed off the core holds,
        # until Linux's clock ticks: milliseconds for every small message. In this class nobody pushes others off.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.environ.update(self.environment)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the rank is to have: one thread, the interface for gloo, and where rank 0 is to be found.

        The numbers of ranks (`RANK`, `WORLD_SIZE`, …) are up to whoever starts them.
        """
        return {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "MASTER_ADDR": self.master,
            "MASTER_PORT": str(PORT),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # not a warning for each connection that the hosts' names are not known
            resources.PINNED: str(self.core),
        }


def cores_for(speeds: Sequence[float], cores: Sequence[int]) -> list[int]:
    """A core for each device, so that none has to give more than it has and all give alike."""
    load = dict.fromkeys(cores, 0.0)
    chosen: dict[int, int] = {}
    for device in sorted(range(len(speeds)), key=lambda device: -speeds[device]):
        core = min(load, key=lambda core: round(load[core], 6))
        load[core] += speeds[device]
        chosen[device] = core
    if max(load.values()) > 1 + 1e-6:
        total, number = sum(speeds), len(cores)
        mend = f"multiply all by {int(100 * number / total) / 100:g} or less" if total > number + 1e-6 else "lower some"
        listed = ", ".join(f"{speed:g}" for speed in speeds)
        raise ConvoyError(
            f"devices of speed {listed}, together {total:g}, do not fit on {units.plural(number, 'core')}: {mend}"
        )
    return [chosen[device] for device in range(len(speeds))]


@contextmanager
def emulate(cluster: Cluster) -> Iterator[list[EmulatedDevice]]:
    """A place for each device of a cluster on this machine, to be sent to its rank's process; gone with the context.

    What a process that was killed has left of its own cluster is removed by the next that makes one.
    """
    if sys.platform != "linux":
        raise ConvoyError("clusters are emulated by Linux's namespaces and control groups: run this on Linux")
    if os.geteuid() != 0:
        raise ConvoyError("emulated hosts are network namespaces, which only root can make: run this as root")
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        raise ConvoyError(f"emulated hosts need {' and '.join(tools)}: install the package iproute2")
    speeds = [device.speed for device in cluster.devices]
    cores = cores_for(speeds, own_cores())
    stack = ExitStack()
    try:
        with _undisturbed():
            namespaces.sweep()
            name = prefix()
            hosts = stack.enter_context(
                namespaces.made_hosts(name, {host: cluster.rate_of(host) for host in cluster.hosts})
            )
            groups = stack.enter_context(namespaces.made_groups(name, speeds))
            shared = {core for core, group in zip(cores, groups, strict=True) if group is not None}
            stack.enter_context(_pulses(sorted(shared)))
        master = hosts[cluster.devices[0].host].address
        yield [
            EmulatedDevice(rank, hosts[device.host], master, cores[rank], groups[rank])
            for rank, device in enumerate(cluster.devices)
        ]
    finally:
        with _undisturbed():
            stack.close()


@contextmanager
def _pulses(cores: Iterable[int]) -> Iterator[None]:
    """A process for each core, which ends with the context, or with this process."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for core in cores:
            command = (sys.executable, "-I", "-S", "-c", _PULSE, str(core), str(os.getpid()))
            started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Have Ctrl-C and SIGTERM wait for what must not be left half done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
