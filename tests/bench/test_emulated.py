"""Emulated clusters as they are: what a device and a link let through, and that nothing is left of them."""

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from convoy.bench.emulated import Cluster, ClusterDevice, EmulatedDevice, emulate
from convoy.bench.emulated.quota import Hierarchy
from convoy.errors import ConvoyError
from processes import alive, children

_PORT = 29_600


@pytest.fixture(scope="module", autouse=True)
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


def on(place: EmulatedDevice, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Start a function on a device; what is returned waits for its result."""
    sent = pickle.dumps((place, function.__name__, args))
    code = (
        "import pickle, sys; sys.path[:0] = sys.argv[1:]; import test_emulated as tests\n"
        "place, name, args = pickle.load(sys.stdin.buffer)\n"
        "place.enter()\n"
        "sys.stdout.buffer.write(pickle.dumps(getattr(tests, name)(*args)))"
    )
    command = (sys.executable, "-c", code, *map(str, Path(__file__).parents[:2]))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(sent)
    process.stdin.close()
    process.stdin = None

    def result() -> Any:
        answer, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        return pickle.loads(answer)

    return result


def test_what_a_cluster_is_made_of_goes_with_it() -> None:
    with emulate(Cluster.alike(2, 0.5, "1gbit")) as places:
        made = left_of(os.getpid())
        assert len(made) == 2 + 1 + 2  # hosts, their switch, groups
        assert pickle.loads(pickle.dumps(places)) == places
        with emulate(Cluster.alike(1)):
            assert len(left_of(os.getpid())) == len(made) + 2
        assert left_of(os.getpid()) == made
    assert left_of(os.getpid()) == []


def test_nothing_is_left_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), emulate(Cluster.alike(2, 0.5, "1gbit")):
        _ = 1 / 0
    assert left_of(os.getpid()) == []


def test_nothing_is_left_when_it_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Hierarchy, name: str, share: float) -> Path:
        raise ConvoyError("no groups")

    monkeypatch.setattr(Hierarchy, "make", refuse)
    with pytest.raises(ConvoyError, match="no groups"), emulate(Cluster.alike(2, 0.5, "1gbit")):
        pass
    assert left_of(os.getpid()) == []


MAKER = """
import sys, time
from convoy.bench.emulated import Cluster, emulate
with emulate(Cluster.alike(2, 0.5, "1gbit")) as places:
    print("made", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def maker() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has made a cluster."""
    process = subprocess.Popen((sys.executable, "-c", MAKER), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"made\n"
    yield process
    process.kill()
    process.communicate()


def test_ctrl_c_removes_it(maker: subprocess.Popen[bytes]) -> None:
    maker.send_signal(signal.SIGINT)
    maker.wait(30)
    assert left_of(maker.pid) == []


def test_what_a_killed_process_left_is_removed_by_the_next(maker: subprocess.Popen[bytes]) -> None:
    with emulate(Cluster.alike(1)):
        assert len(left_of(maker.pid)) == 5  # its maker lives
    helpers = children(maker.pid)
    maker.kill()
    maker.wait()
    assert len(left_of(maker.pid)) == 5
    with emulate(Cluster.alike(1)):
        assert left_of(maker.pid) == []
    assert helpers
    for _ in range(100):
        if not any(map(alive, helpers)):
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"{helpers} outlived their cluster")


def test_a_process_that_stays_goes_back_to_the_group_around() -> None:
    with emulate(Cluster.alike(1, 0.5)) as places:
        process = subprocess.Popen(("sleep", "60"))
        assert places[0].group is not None
        (places[0].group / "cgroup.procs").write_text(str(process.pid))
    try:
        assert left_of(os.getpid()) == []
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def busy(seconds: float) -> tuple[float, set[int]]:
    """The share of the time that this process runs while it wants to, and on which cores."""
    start, before = time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        pass
    return (time.process_time() - before) / (time.perf_counter() - start), os.sched_getaffinity(0)


@pytest.mark.slow
def test_a_device_has_no_more_than_its_share() -> None:
    with emulate(Cluster.alike(2, 0.3, "1gbit")) as places:
        for place in places:
            share, cores = on(place, busy, 1.0)()
            assert share < 0.4  # less is what others on this machine leave
            assert cores == {place.core}


def test_a_whole_core_is_not_limited() -> None:
    with emulate(Cluster.alike(1)) as places:
        assert places[0].group is None
        share, cores = on(places[0], busy, 0.2)()
        assert share > 0
        assert cores == {places[0].core}


def send(address: str, num_bytes: int) -> float:
    """Bits a second to another device."""
    for _ in range(100):
        try:
            connection = socket.create_connection((address, _PORT), timeout=30)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    else:
        raise TimeoutError(address)
    with connection:
        start = time.perf_counter()
        connection.sendall(bytes(num_bytes))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b"x"
        return 8 * num_bytes / (time.perf_counter() - start)


def receive(address: str) -> None:
    """All that one connection brings."""
    with socket.create_server((address, _PORT)) as server:
        server.settimeout(30)
        connection, _ = server.accept()
        with connection:
            while connection.recv(1 << 20):
                pass
            connection.sendall(b"x")


def between(source: EmulatedDevice, target: EmulatedDevice, num_bytes: int) -> float:
    receiving = on(target, receive, target.host.address)
    sending = on(source, send, target.host.address, num_bytes)
    rate: float = sending()
    receiving()
    return rate


@pytest.mark.slow
def test_a_link_lets_no_more_through_than_its_rate() -> None:
    devices = (ClusterDevice(0.5, "a"), ClusterDevice(0.5, "a"), ClusterDevice(0.5, "b"))
    with emulate(Cluster(devices, "100mbit")) as (first, beside, other):
        assert 10e6 < between(first, other, 2**21) < 120e6
        assert 10e6 < between(other, first, 2**21) < 120e6
        assert between(first, beside, 2**24) > 130e6  # in one host nothing is on the link


@pytest.mark.slow
def test_links_may_be_unequal() -> None:
    devices = (ClusterDevice(1.0, "a"), ClusterDevice(0.5, "b"))
    with emulate(Cluster(devices, rates={"a": "1gbit", "b": "50mbit"})) as (first, other):
        assert 5e6 < between(first, other, 2**20) < 70e6
        assert 5e6 < between(other, first, 2**20) < 70e6


def join() -> tuple[float, int]:
    """Seconds to join the other ranks, and how many there are."""
    import torch.distributed as dist

    start = time.perf_counter()
    dist.init_process_group("gloo")
    seconds, num = time.perf_counter() - start, dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    return seconds, num


def rank_of(place: EmulatedDevice, num: int) -> tuple[float, int]:
    os.environ |= {**place.environment, "RANK": str(place.rank), "WORLD_SIZE": str(num)}
    return join()


@pytest.mark.slow
def test_ranks_meet_without_waiting_for_name_servers() -> None:
    with emulate(Cluster.alike(2, 0.5, "1gbit")) as places:
        ranks = [on(place, rank_of, place, 2) for place in places]
        found = [rank() for rank in ranks]
    assert [num for _, num in found] == [2, 2]


def test_a_place_that_is_gone_is_refused() -> None:
    with emulate(Cluster.alike(1, 0.5)) as places:
        pass
    with pytest.raises(ConvoyError, match="before its cluster is removed"):
        places[0].enter()


def test_without_root_or_tools_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(ConvoyError, match="install the package iproute2"), emulate(Cluster.alike(1)):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConvoyError, match="run this as root"), emulate(Cluster.alike(1)):
        pass
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConvoyError, match="run this on Linux"), emulate(Cluster.alike(1)):
        pass
