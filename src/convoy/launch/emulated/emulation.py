"""Makes an emulated cluster, and removes it."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from convoy.errors import ConvoyError
from convoy.launch.cores import own_cores
from convoy.launch.emulated import network, quota
from convoy.launch.emulated.cluster import Cluster
from convoy.launch.emulated.maker import prefix
from convoy.launch.emulated.place import Place, cores_for
from convoy.launch.emulated.pulse import pulses


@contextmanager
def emulate(cluster: Cluster) -> Iterator[list[Place]]:
    """A cluster on this machine, gone when the context is left.

    What a process that was killed has left of its own cluster is removed by the next that makes one.

    Returns:
        A place for each device, in order; they can be pickled and sent to the processes of the ranks.

    Raises:
        ConvoyError: the machine has too few cores, this process may not make it, or a tool is missing.
    """
    _check_rights()
    network.check_tools()
    speeds = [device.speed for device in cluster.devices]
    cores = cores_for(speeds, own_cores())
    made = ExitStack()
    try:
        with _undisturbed():
            network.sweep()
            quota.sweep()
            name = prefix()
            hosts = made.enter_context(
                network.made_hosts(name, {host: cluster.rate_of(host) for host in cluster.hosts})
            )
            groups = made.enter_context(quota.made_groups(name, speeds))
            shared = {core for core, group in zip(cores, groups, strict=True) if group is not None}
            made.enter_context(pulses(sorted(shared)))
        master = hosts[cluster.devices[0].host].address
        yield [
            Place(rank, device.speed, device.host, hosts[device.host], master, cores[rank], groups[rank])
            for rank, device in enumerate(cluster.devices)
        ]
    finally:
        with _undisturbed():
            made.close()


def _check_rights() -> None:
    if sys.platform != "linux":
        raise ConvoyError("clusters are emulated by Linux's namespaces and control groups: run this on Linux")
    if os.geteuid() != 0:
        raise ConvoyError("emulated hosts are network namespaces, which only root can make: run this as root")


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
