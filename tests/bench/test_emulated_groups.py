"""Control groups of both versions, by what is written to their files, and the names of what is made."""

import os
from pathlib import Path

import pytest

from convoy.bench.emulated import network, quota
from convoy.bench.emulated import network as maker
from convoy.bench.emulated.quota import Hierarchy
from convoy.errors import ConvoyError

_DEAD = f"convoy-{2**22 + 1}-5-0-"  # no process has so large a number


def mounts(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    file = folder / "mountinfo"
    file.write_text("".join(f"32 31 0:29 / {line}\n" for line in lines))
    monkeypatch.setattr(quota, "_MOUNTS", file)


def test_version_1_is_found_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cpu"
    (root / "mine").mkdir(parents=True)
    mounts(
        tmp_path, monkeypatch, f"{tmp_path} rw - cgroup cgroup rw,memory", f"{root} rw - cgroup cgroup rw,cpu,cpuacct"
    )
    own = tmp_path / "own"
    own.write_text("4:memory:/other\n1:cpu,cpuacct:/mine\n0::/\n")
    monkeypatch.setattr(quota, "_OWN", own)
    hierarchy = Hierarchy.find()
    assert hierarchy == Hierarchy(root / "mine", 1)
    group = hierarchy.make("half", 0.5)
    assert (group / "cpu.cfs_quota_us").read_text() == "2000"
    assert (group / "cpu.cfs_period_us").read_text() == "4000"


def test_version_2_is_found_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io\n")
    (tmp_path / "cgroup.subtree_control").write_text("io\n")
    mounts(tmp_path, monkeypatch, f"{tmp_path} rw - cgroup2 cgroup2 rw,nsdelegate")
    hierarchy = Hierarchy.find()
    assert hierarchy == Hierarchy(tmp_path, 2)
    group = hierarchy.make("small", 0.1)
    assert (group / "cpu.max").read_text() == "1000 10000"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"


def test_without_the_controller_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    mounts(tmp_path, monkeypatch, f"{tmp_path} rw - cgroup2 cgroup2 rw", "/proc rw - proc proc rw")
    with pytest.raises(ConvoyError, match="give every device the speed 1"):
        Hierarchy.find()


def test_a_group_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(ConvoyError, match="cannot have a share of a core here"):
        Hierarchy(tmp_path / "none", 1).make("half", 0.5)


def test_only_what_dead_makers_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = maker.prefix()
    reused = f"convoy-{os.getpid()}-1-0-"  # the number of this process, from before it started
    names = [f"{_DEAD}host0", f"{_DEAD}switch", f"{reused}host1", f"{mine}host0", "convoy-other", "convoy-1-host0"]
    removed: list[str] = []
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setattr(network, "_FOLDER", tmp_path)
    monkeypatch.setattr(network, "_delete", removed.append)
    network.sweep()
    assert sorted(removed) == sorted(names[:3])


def test_groups_of_dead_makers_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hierarchy, "find", staticmethod(lambda: Hierarchy(tmp_path, 1)))
    for name in (f"{_DEAD}device0", f"{maker.prefix()}device0", "another"):
        (tmp_path / name).mkdir()
    quota.sweep()
    assert not (tmp_path / f"{_DEAD}device0").exists()
    assert len(list(tmp_path.iterdir())) == 2
