"""Emulated clusters: how they are described, what a device and a link let through, and that nothing is left of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from convoy.bench import namespaces
from convoy.bench.emulated import Cluster, ClusterDevice, emulate
from convoy.bench.namespaces import Hierarchy
from convoy.bench.processes import Say, run_ranks
from convoy.comm.joining import join
from convoy.errors import ConvoyError
from processes import alive, children
from started import wait_for


def read(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return Cluster.read(path)


def test_a_file_describes_a_cluster_and_a_mistake_in_it_is_one_sentence(tmp_path: Path) -> None:
    two_each = read(tmp_path, "devices: {count: 4, hosts: 2}\nlinks: {rate: 1gbit}\n")
    assert two_each.devices == tuple(ClusterDevice(1.0, f"host{number // 2}") for number in range(4))
    entries = "[{speed: 0.5, host: a}, {speed: 0.25, host: b, count: 2}, {speed: 0.4}]"
    unequal = read(tmp_path, f"devices: {entries}\nlinks: {{rate: 3gbit, hosts: {{b: 300mbit}}}}\n")
    devices = [(0.5, "a"), (0.25, "b"), (0.25, "b"), (0.4, "host3")]
    assert unequal.devices == tuple(ClusterDevice(*device) for device in devices)
    assert str(unequal) == "4 devices with 0.5, 0.25, 0.25, 0.4 of a core in 3 hosts, links of 3gbit, 300mbit, 3gbit"
    with pytest.raises(ConvoyError, match=r"cluster\.yaml: devices\.sped is unknown: did you mean devices\.speed\?"):
        read(tmp_path, "devices: {count: 2, sped: 1}")
    with pytest.raises(ConvoyError, match=r"cluster\.yaml: the link of host host0 has no rate"):
        read(tmp_path, "devices: {count: 2}")


# Clusters as they are.


@pytest.fixture(scope="module")
def able() -> None:
    """Clusters can be emulated here."""
    try:
        with emulate(Cluster.alike(1, 0.5)):
            pass
    except ConvoyError as error:
        pytest.skip(str(error))


def left_of(pid: int) -> list[str]:
    """What there is that a process has made."""
    folders = (Path("/run/netns"), Hierarchy.find().folder)
    return [path.name for folder in folders for path in folder.glob(f"convoy-{pid}-*")]


MAKER = """
import sys, time
from convoy.bench.emulated import Cluster, emulate
with emulate(Cluster.alike(2, 0.5, "1gbit")) as places:
    print("made", flush=True)
    time.sleep(60)
"""


@pytest.mark.usefixtures("able")
def test_what_an_interrupted_or_killed_process_has_made_is_removed() -> None:
    command = (sys.executable, "-c", MAKER)
    makers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(2)]
    interrupted, killed = makers
    try:
        for maker in makers:
            assert maker.stdout is not None and maker.stdout.readline() == b"made\n"
        interrupted.send_signal(signal.SIGINT)
        interrupted.wait(30)
        assert left_of(interrupted.pid) == []
        with emulate(Cluster.alike(1)):
            assert len(left_of(killed.pid)) == 5  # its maker lives
        assert namespaces.is_left(f"convoy-{os.getpid()}-1-0-host1")  # of a process of this number that ended long ago
        pulses = children(killed.pid)
        killed.kill()
        killed.wait()
        assert pulses and len(left_of(killed.pid)) == 5
        with emulate(Cluster.alike(1)):
            assert left_of(killed.pid) == []
        wait_for(lambda: not any(map(alive, pulses)), 10)
    finally:
        for maker in makers:
            maker.kill()
            maker.communicate()


def talk(say: Say) -> tuple[float, set[int], list[float]]:
    """The share of the time that this rank runs while it wants to, its cores, and bits a second to it from others."""
    join(device="cpu")
    rank = dist.get_rank()
    start, before = time.perf_counter(), time.process_time()
    while time.perf_counter() - start < 1.0:
        pass
    share, rates = (time.process_time() - before) / (time.perf_counter() - start), []
    for source, target, size in ((0, 2, 2**21), (2, 0, 2**21), (0, 1, 2**24)):
        data = torch.empty(size, dtype=torch.uint8)
        dist.barrier()
        start = time.perf_counter()
        if rank == source:
            dist.send(data, target)
        elif rank == target:
            dist.recv(data, source)
            rates.append(8 * size / (time.perf_counter() - start))
    return share, os.sched_getaffinity(0), rates


@pytest.mark.slow
@pytest.mark.usefixtures("able")
def test_a_device_has_its_share_and_a_link_its_rate() -> None:
    devices = (ClusterDevice(0.3, "a"), ClusterDevice(0.3, "a"), ClusterDevice(0.5, "b"))
    with emulate(Cluster(devices, rates={"a": "1gbit", "b": "100mbit"})) as places:
        (first, _, (slow_in,)), (beside, _, (fast,)), (other, _, (slow_out,)) = results = run_ranks(talk, places)
    assert max(first, beside) < 0.4 and other < 0.6  # less is what others on this machine leave
    assert [cores for _, cores, _ in results] == [{place.core} for place in places]
    assert 5e6 < slow_in < 120e6 and 5e6 < slow_out < 120e6
    assert fast > 130e6  # in one host nothing is on the link
