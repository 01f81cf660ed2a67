"""The cores and the memory that ranks of a machine have: their shares, and what control groups leave them."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from convoy import resources
from convoy.errors import ConvoyError, MachineError

PINNED = """
import os, threading
from convoy import resources
ends, go = [], threading.Event()
thread = threading.Thread(target=lambda: (go.wait(), ends.append(os.sched_getaffinity(0))))
thread.start()
own = resources.own_cores()
cases = {
    "shared": ([("here", own), ("here", own)], resources.share(own, 2, 1, None)),
    "another machine": ([("there", own), ("here", own)], own),
    "its own already": ([("here", [max(own) + 1]), ("here", own)], own),
}
for name, (answers, expected) in cases.items():
    os.sched_setaffinity(0, own)
    assert resources.take_share(lambda answer: answers, 1, None) == expected, name
resources.pin(own[:1]); go.set(); thread.join()
assert ends == [set(own[:1])] == [os.sched_getaffinity(0)], ends
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_a_rank_takes_its_share_with_all_of_its_threads() -> None:
    subprocess.run([sys.executable, "-c", PINNED], check=True, timeout=60)


def test_ranks_have_runs_of_cores_or_take_turns() -> None:
    def shares(num_ranks: int, per_device: int | None = None) -> list[list[int]]:
        return [resources.share(range(6), num_ranks, place, per_device) for place in range(num_ranks)]

    assert shares(2) == [[0, 1, 2], [3, 4, 5]]
    assert shares(4) == [[0], [1], [2], [3]]
    assert shares(2, 1) == [[0], [1]]
    assert shares(8) == [[0], [1], [2], [3], [4], [5], [0], [1]]
    with pytest.raises(ConvoyError, match="--cores-per-device 4 on 2 devices needs 8 cores, but here are 6"):
        shares(2, 4)
    assert resources.in_turns(2, 2) is None
    assert resources.in_turns(4, 2) == "4 devices share 2 cores and compute in turns: that is no faster than 2"
    assert resources.in_turns(2, 1) == "2 devices share one core and compute in turns: that is no faster than one"


@pytest.mark.parametrize(
    ("is_pinned", "ranks", "allowed", "share"),
    [(False, 1, 16.0, 16.0), (False, 4, 16.0, 4.0), (True, 4, 64.0, 16.0), (False, 4, 4.0, 1.0), (True, 4, 4.0, 1.0)],
)
def test_ranks_share_cores_and_a_quota(
    monkeypatch: pytest.MonkeyPatch, is_pinned: bool, ranks: int, allowed: float, share: float
) -> None:
    monkeypatch.setattr(resources, "own_cores", lambda: list(range(16)))
    monkeypatch.setattr(resources, "cores_allowed", lambda: allowed)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv(resources.PINNED, "0-15")
    if not is_pinned:
        monkeypatch.delenv(resources.PINNED)
    assert resources.own_share() == share


GROUPS = {
    2: ("0::/batch/job", "", ("memory.max", "memory.current"), ""),
    1: ("4:cpu,memory:/batch/job", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("version", GROUPS)
def test_control_groups_and_those_around_them_limit_memory_and_files_count_as_free(
    tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, folder, names, prefix = GROUPS[version]
    group, mount = tmp_path / "cgroup", tmp_path / folder
    assert list(resources.memory_limits(group, tmp_path)) == []
    write(group, "nonsense\n0::/gone\n")
    assert list(resources.memory_limits(group, tmp_path)) == []
    write(group, f"9:pids:/other\n{line}\n")
    for place, limit in (("batch/job", "max"), ("batch", "5000"), ("", "9000")):
        write(mount / place / names[0], f"{limit}\n")
    limits = sorted(resources.memory_limits(group, tmp_path))
    assert limits == [5000, 9000]
    write(mount / "batch" / names[1], "3000\n")
    stat = f"{prefix}rss 2000\n{prefix}inactive_file 600\n{prefix}active_file 400\n{prefix}active_anon 70\n"
    write(mount / "batch" / "memory.stat", stat)
    left = list(resources.memory_left(group, tmp_path))
    assert left == [3000]

    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2}.__getitem__)
    write(tmp_path / "meminfo", "MemTotal: 9000 kB\nMemAvailable:    4 kB\n")
    monkeypatch.setattr(resources, "_MEMINFO", tmp_path / "meminfo")
    for of_groups, host, free in (((), 8192, 4096), ((5000, 3000), 3000, 3000), ((2**63,), 8192, 4096)):
        monkeypatch.setattr(resources, "memory_limits", lambda numbers=of_groups: numbers)
        monkeypatch.setattr(resources, "memory_left", lambda numbers=of_groups: numbers)
        assert (resources.host_memory(), resources.free_memory()) == (host, free)


def test_a_rank_that_could_start_no_more_threads_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if len(started) == 5:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(MachineError, match=r"no 8 more threads .* raise the limit .* \(ulimit -u\) or .* \(pids\)"):
        resources.check_threads()
    assert not any(thread.is_alive() for thread in started)
