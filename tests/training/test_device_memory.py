"""The memory that a plan may take: of the machine or its control groups, shared by the ranks of a host."""

from pathlib import Path

import pytest
import torch

from convoy.planner.cost.device import SHARE, device_memory, memory_limits


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_ranks_of_a_host_share_its_memory() -> None:
    alone, _ = device_memory(torch.device("cpu"), 1)
    shared, source = device_memory(torch.device("cpu"), 4)
    assert shared == pytest.approx(alone / 4)
    assert alone > 0
    assert "over 4 devices" in source and f"{SHARE:.1f}" == "0.9" and "nine tenths" in source


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
