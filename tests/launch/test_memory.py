"""The memory that processes may have: of the machine, or of the control groups that they are in."""

import os
from pathlib import Path

import pytest

from convoy.launch import memory
from convoy.launch.memory import free_memory, host_memory, memory_left, memory_limits


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("line", "file"),
    [("0::/batch/job", "memory.max"), ("4:cpu,memory:/batch/job", "memory/memory.limit_in_bytes")],
)
def test_control_groups_and_those_around_them_limit(tmp_path: Path, line: str, file: str) -> None:
    mount, name = (tmp_path / file).parent, Path(file).name
    write(tmp_path / "cgroup", f"9:pids:/other\n{line}\n")
    write(mount / "batch/job" / name, "max\n")
    write(mount / "batch" / name, "3000\n")
    write(mount / name, "5000\n")
    assert sorted(memory_limits(tmp_path / "cgroup", tmp_path)) == [3000, 5000]


def test_no_groups_no_limits(tmp_path: Path) -> None:
    assert list(memory_limits(tmp_path / "missing", tmp_path)) == []
    write(tmp_path / "cgroup", "nonsense\n0::/gone\n")
    assert list(memory_limits(tmp_path / "cgroup", tmp_path)) == []


@pytest.mark.parametrize(("limits", "expected"), [((), 2**33), ((2**32, 2**63), 2**32), ((2**63,), 2**33)])
def test_the_least_counts(monkeypatch: pytest.MonkeyPatch, limits: tuple[int, ...], expected: int) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**21}.__getitem__)
    monkeypatch.setattr(memory, "memory_limits", lambda: limits)
    assert host_memory() == expected


@pytest.mark.parametrize(
    ("line", "folder", "names", "prefix"),
    [
        ("0::/job", "job", ("memory.max", "memory.current"), ""),
        ("4:memory:/job", "memory/job", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
    ],
)
def test_what_a_group_has_left_counts_files_as_free(
    tmp_path: Path, line: str, folder: str, names: tuple[str, str], prefix: str
) -> None:
    write(tmp_path / "cgroup", f"{line}\n")
    for name, number in zip(names, (5000, 3000), strict=True):
        write(tmp_path / folder / name, f"{number}\n")
    stat = f"{prefix}rss 2000\n{prefix}inactive_file 600\n{prefix}active_file 400\n{prefix}active_anon 70\n"
    write(tmp_path / folder / "memory.stat", stat)
    assert list(memory_left(tmp_path / "cgroup", tmp_path)) == [3000]


def test_free_is_what_the_machine_and_the_groups_have_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "meminfo", "MemTotal: 9000 kB\nMemAvailable:    4 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    for left, expected in (((), 4096), ((5000, 3000), 3000), ((-1,), 0)):
        monkeypatch.setattr(memory, "memory_left", lambda left=left: left)
        assert free_memory() == expected
