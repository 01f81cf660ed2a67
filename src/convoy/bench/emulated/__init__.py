"""Emulates a cluster on one Linux machine: devices with a share of a core each, hosts that only a link joins.

cluster = Cluster.read("four.yaml")
with emulate(cluster) as places:
    ...                                # in the process of a rank, before torch starts threads:
    places[rank].enter()
    os.environ |= places[rank].environment
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from convoy import resources
from convoy.bench.emulated import network
from convoy.bench.emulated.cluster import Cluster, ClusterDevice
from convoy.bench.emulated.network import INTERFACE, EmulatedHost, prefix
from convoy.errors import ConvoyError
from convoy.resources import own_cores

__all__ = ["Cluster", "ClusterDevice", "EmulatedDevice", "emulate"]

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

    def enter(self) -> None:
        """Put the calling process here, for good: in the host's network, with the share of its core.

        To be called before torch starts threads, by a process of the user root. All threads of the process together
        have the share, those of gloo too.
        """
        if self.group is not None:
            network.enter_group(self.group)
        self.host.enter()
        resources.pin([self.core])
        # gloo's thread tries again and again for a lock that the thread which it has just pushed off the core holds,
        # until Linux's clock ticks: milliseconds for every small message. In this class nobody pushes others off.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

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
        total = sum(speeds)
        have = f"{len(cores)} core{'s' if len(cores) > 1 else ''}"
        if total > len(cores) + 1e-6:
            raise ConvoyError(
                f"the speeds of the devices add up to {total:g} cores, but here {'are' if len(cores) > 1 else 'is'} "
                f"{have}: multiply all speeds by {int(100 * len(cores) / total) / 100:g} or less"
            )
        raise ConvoyError(f"devices of speed {', '.join(f'{s:g}' for s in speeds)} do not fit on {have}: lower some")
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
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ConvoyError(f"emulated hosts need {' and '.join(missing)}: install the package iproute2")
    speeds = [device.speed for device in cluster.devices]
    cores = cores_for(speeds, own_cores())
    made = ExitStack()
    try:
        with _undisturbed():
            network.sweep()
            name = prefix()
            hosts = made.enter_context(
                network.made_hosts(name, {host: cluster.rate_of(host) for host in cluster.hosts})
            )
            groups = made.enter_context(network.made_groups(name, speeds))
            shared = {core for core, group in zip(cores, groups, strict=True) if group is not None}
            made.enter_context(_pulses(sorted(shared)))
        master = hosts[cluster.devices[0].host].address
        yield [
            EmulatedDevice(rank, hosts[device.host], master, cores[rank], groups[rank])
            for rank, device in enumerate(cluster.devices)
        ]
    finally:
        with _undisturbed():
            made.close()


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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
