"""What a run needs goes away while it trains: its folder, or the processes that load its pictures."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import children
from started import Started, command, steps, wait_for
from tiny import write_mnist, write_pictures

DEVICES = ["1", pytest.param("2", marks=pytest.mark.slow)]
LONG = ("--set", "evaluate_every=100000ba")


def begun(start: Callable[[list[str]], Started], words: list[str], out: Path) -> Started:
    run = start(words)
    wait_for(lambda: steps(out) > 1 or run.process.poll() is not None, 100)
    assert run.process.poll() is None, run.end(1)
    return run


@pytest.mark.parametrize("devices", DEVICES)
def test_a_folder_that_is_removed_is_not_made_anew(
    devices: str, tmp_path: Path, start: Callable[[list[str]], Started]
) -> None:
    """Nor with restarts left: the run would begin anew in silence."""
    out = tmp_path / "run"
    options = ("--devices", devices, "--max-restarts", "2", *LONG)
    run = begun(start, command(write_mnist(tmp_path / "data"), out, *options, epochs="100000ba"), out)
    shutil.rmtree(out)
    _, said = run.end(30)
    assert run.process.returncode == 1
    assert f"{out} is not the folder any more that this run writes to" in said.splitlines()[-1]
    assert "it was removed; nothing is there now" in said and "start again" not in said
    assert not out.exists()


def test_another_disk_below_is_not_written_to(tmp_path: Path, start: Callable[[list[str]], Started]) -> None:
    """As where the run directory is a mount point: there is a folder still, but not the run's."""
    out = tmp_path / "run"
    words = command(write_mnist(tmp_path / "data"), out, *LONG, "--set", "checkpoint.every=10ba", epochs="100000ba")
    run = begun(start, words, out)
    (tmp_path / "empty").mkdir()
    out.rename(tmp_path / "disk")
    (tmp_path / "empty").rename(out)
    _, said = run.end(30)
    assert run.process.returncode == 1
    assert f"it was moved; go on with convoy train {tmp_path / 'disk'} --resume" in said
    assert not list(out.iterdir())


def processes_that_load(pid: int) -> list[int]:
    """The last ones of the tree below a process: those that the server of its workers has made."""
    below = children(pid)
    if below:
        return [each for child in below for each in processes_that_load(child)]
    return [pid] if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes() else []


@pytest.mark.parametrize("devices", DEVICES)
def test_processes_that_are_stopped_are_named_and_do_not_stay(
    devices: str, tmp_path: Path, start: Callable[[list[str]], Started]
) -> None:
    out = tmp_path / "run"
    pictures = ("--workers", "2", "--set", "data.image_size=28", "--set", "data.resize=32", *LONG)
    data = write_pictures(tmp_path / "data", size=(90, 70))
    options = ("--devices", devices, "--timeout", "10s", *pictures)
    run = begun(start, command(data, out, *options, epochs="100000ba"), out)
    stopped = processes_that_load(run.process.pid)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    _, said = run.end(60)
    assert run.process.returncode == 1
    first = next(line for line in said.splitlines() if "moved for" in line)
    assert "(--timeout): update " in first and "waiting for data (process " in first
    assert any(f"process {pid}, which is stopped, has not " in first for pid in stopped) and " train/" in first
    assert json.loads((out / "summary.json").read_text())["status"] == "failed"
    for pid in stopped:
        wait_for(lambda pid=pid: not Path(f"/proc/{pid}").exists(), 10)
