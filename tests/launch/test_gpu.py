"""What `nvidia-smi` says of a GPU, of drivers old and new, and where it is of no use."""

import os
from pathlib import Path

import pytest
import torch

from convoy.launch import gpu
from convoy.launch.gpu import GpuProcess, GpuWatch
from convoy.launch.host import HostWatch

# It knows the names of fields that its driver knows, and fails where it is asked for others.
NVIDIA_SMI = """#!/bin/sh
echo "$@" >> {folder}/asked
case "$*" in
  *compute-apps*) cat {folder}/processes ;;
  *counters*) [ {driver} = 2025 ] && cat {folder}/counters && rm {folder}/counters && exit
              [ {driver} = 2025 ] && cat {folder}/later && exit
              echo 'Field is not a valid field to query.'; exit 2 ;;
  *) [ {driver} = 2023 ] && echo '7' && exit; echo '[N/A]' ;;
esac
"""


def watch(folder: Path, monkeypatch: pytest.MonkeyPatch, driver: int, script: str = NVIDIA_SMI) -> GpuWatch:
    (folder / "counters").write_text("99, 1000000, 500000, [N/A]\n")
    (folder / "later").write_text("40, 1000000, 2500000, [N/A]\n")
    (folder / "processes").write_text(
        f"{os.getpid()}, python, 900\n77, /opt/other job/bin/render, 100\n78, python, [N/A]\n79, python, 400\n"
    )
    program = folder / "nvidia-smi"
    program.write_text(script.format(folder=folder, driver=driver))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu, "_identifier", lambda device: "GPU-1")
    monkeypatch.setattr(gpu, "_SAMPLED_S", 0.0)
    return GpuWatch(torch.device("cuda"))


def test_a_gpu_that_throttles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = watch(tmp_path, monkeypatch, 2025)
    load = reader.read(lambda pid: pid in (os.getpid(), 79))
    assert load is not None
    assert load.throttled_s == {"sw_power_cap": 0.0, "sw_thermal_slowdown": 2.0}
    assert load.others_busy == 0.4
    assert load.others == (GpuProcess("render", 77, 100 * 2**20), GpuProcess("python", 78, 0))
    assert "-i GPU-1 --query-gpu=utilization.gpu," in (tmp_path / "asked").read_text()
    again = reader.read(lambda pid: True)
    assert again is not None and again.throttled_s["sw_thermal_slowdown"] == 0  # since the reading before


def test_older_drivers_and_processes_of_another_name_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for driver in (2023, 2020):
        reader = watch(tmp_path, monkeypatch, driver)
        load = reader.read(lambda pid: True)
        assert load is not None and (load.throttled_s, load.others_busy) == ({}, 0.0)  # no others: not looked at
    (tmp_path / "processes").write_text("4711, python, 900\n")
    load = reader.read(lambda pid: False)
    assert load is not None and load.others == ()


def test_where_nobody_answers_there_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in (None, torch.device("cpu"), torch.device("cuda", 63)):
        assert HostWatch(device).read().gpu is None
    monkeypatch.setattr(gpu, "_TIMEOUT_S", 0.1)
    for script in ("#!/bin/sh\nexit 9\n", "#!/bin/sh\nexec sleep 60\n", "#!/bin/sh\necho\n", "gone"):
        assert watch(tmp_path, monkeypatch, 2025, script).read(lambda pid: False) is None
