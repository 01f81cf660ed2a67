"""The cores and the memory that ranks of a machine have: their shares, and what control groups leave them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from convoy.errors import ConvoyError
from convoy.launch import cores, memory
from convoy.launch.cores import free_memory, host_memory, memory_left, memory_limits


def test_ranks_have_runs_of_cores_or_take_turns() -> None:
    def shares(num_ranks: int, per_device: int | None = None) -> list[list[int]]:
        return [cores.share(range(6), num_ranks, place, per_device) for place in range(num_ranks)]

    assert shares(2) == [[0, 1, 2], [3, 4, 5]]
    assert shares(4) == [[0], [1], [2], [3]]
    assert shares(2, 1) == [[0], [1]]
    assert shares(8) == [[0], [1], [2], [3], [4], [5], [0], [1]]
    with pytest.raises(ConvoyError, match="--cores-per-device 4 on 2 devices needs 8 cores, but here are 6"):
        shares(2, 4)
    assert cores.in_turns(2, 2) is None
    assert cores.in_turns(4, 2) == "4 devices share 2 cores and compute in turns: that is no faster than 2"
    assert cores.in_turns(2, 1) == "2 devices share one core and compute in turns: that is no faster than one"


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([("here", [0, 1, 2, 3]), ("here", [0, 1, 2, 3])], [2, 3]),
        ([("there", [0, 1, 2, 3]), ("here", [0, 1, 2, 3])], [0, 1, 2, 3]),
        ([("here", [4, 5]), ("here", [0, 1, 2, 3])], [0, 1, 2, 3]),
    ],
    ids=["shared", "another machine", "its own already"],
)
def test_a_rank_takes_its_share(
    monkeypatch: pytest.MonkeyPatch, ranks: list[tuple[str, list[int]]], expected: list[int]
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    monkeypatch.setattr(cores, "own_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(cores, "pin", lambda own: None)
    assert cores.take_share(lambda own: ranks, 1, None) == expected


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_all_threads_are_pinned() -> None:
    code = (
        "import os, threading\n"
        "from convoy.launch import cores\n"
        "found = []\n"
        "go = threading.Event()\n"
        "thread = threading.Thread(target=lambda: (go.wait(), found.append(os.sched_getaffinity(0))))\n"
        "thread.start()\n"
        "own = cores.own_cores()[:1]\n"
        "cores.pin(own); go.set(); thread.join()\n"
        "assert found == [set(own)] == [os.sched_getaffinity(0)], found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_ranks_share_cores_and_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "own_cores", lambda: list(range(16)))
    for is_pinned, ranks, allowed, share in (
        (False, 1, 16.0, 16.0),
        (False, 4, 16.0, 4.0),
        (True, 4, 64.0, 16.0),
        (False, 4, 4.0, 1.0),
        (True, 4, 4.0, 1.0),
    ):
        monkeypatch.setattr(cores, "cores_allowed", lambda allowed=allowed: allowed)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv(cores.PINNED, "0-15")
        if not is_pinned:
            monkeypatch.delenv(cores.PINNED)
        assert cores.own_share() == share


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("line", "folder", "names", "prefix"),
    [
        ("0::/batch/job", "", ("memory.max", "memory.current"), ""),
        (
            "4:cpu,memory:/batch/job",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "total_",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_control_groups_and_those_around_them_limit_memory_and_files_count_as_free(
    tmp_path: Path, line: str, folder: str, names: tuple[str, str], prefix: str
) -> None:
    group, mount = tmp_path / "cgroup", tmp_path / folder
    assert list(memory_limits(group, tmp_path)) == []
    write(group, "nonsense\n0::/gone\n")
    assert list(memory_limits(group, tmp_path)) == []
    write(group, f"9:pids:/other\n{line}\n")
    for place, limit in (("batch/job", "max"), ("batch", "5000"), ("", "9000")):
        write(mount / place / names[0], f"{limit}\n")
    assert sorted(memory_limits(group, tmp_path)) == [5000, 9000]
    write(mount / "batch" / names[1], "3000\n")
    stat = f"{prefix}rss 2000\n{prefix}inactive_file 600\n{prefix}active_file 400\n{prefix}active_anon 70\n"
    write(mount / "batch" / "memory.stat", stat)
    assert list(memory_left(group, tmp_path)) == [3000]


def test_the_least_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**21}.__getitem__)
    for limits, expected in (((), 2**33), ((2**32, 2**63), 2**32), ((2**63,), 2**33)):
        monkeypatch.setattr(memory, "memory_limits", lambda limits=limits: limits)
        assert host_memory() == expected
    write(tmp_path / "meminfo", "MemTotal: 9000 kB\nMemAvailable:    4 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    for left, expected in (((), 4096), ((5000, 3000), 3000), ((-1,), 0)):
        monkeypatch.setattr(memory, "memory_left", lambda left=left: left)
        assert free_memory() == expected
