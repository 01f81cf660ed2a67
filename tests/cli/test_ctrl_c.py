"""Ctrl-C when there is nothing to save yet, and when all is saved already, on two devices. Real processes."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from started import Started, command, wait_for
from tiny import write_mnist


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("ctrl-c") / "data")


@pytest.mark.slow
def test_while_the_ranks_start(data: Path, tmp_path: Path, start: Callable[[list[str]], Started]) -> None:
    out = tmp_path / "run"
    run = start(command(data, out, "--devices", "2"))
    wait_for(lambda: len(run.ranks()) == 2, 60)
    run.process.send_signal(signal.SIGINT)
    output, errors = run.end(60)
    assert run.process.returncode == 1
    assert (output, errors) == ("", "SIGINT: stopped at once, without saving\n")
    assert not out.exists()


@pytest.mark.slow
def test_what_is_killed_before_it_saved_anything_does_not_speak_of_resuming(
    data: Path, tmp_path: Path, start: Callable[[list[str]], Started]
) -> None:
    run = start(command(data, tmp_path / "run", "--devices", "2"))
    wait_for(lambda: len(run.ranks()) == 2, 60)
    os.kill(run.ranks()[0], signal.SIGKILL)
    killed = "it was ended by SIGKILL; the machine may be out of memory; nothing was saved yet"
    assert run.end(60) == ("", f"rank 0 failed: {killed}\n")
    assert run.process.returncode == 1


@pytest.mark.slow
def test_what_saves_nothing_does_not_speak_of_it(data: Path, start: Callable[[list[str]], Started]) -> None:
    line = [sys.executable, "-m", "convoy", "doctor", "train", "tiny:TinyNet", "--data", str(data), "--batch", "24"]
    asked = start([*line, "--devices", "2", "--microbatches", "2"])
    wait_for(lambda: len(asked.ranks()) == 2, 60)
    asked.process.send_signal(signal.SIGINT)
    assert asked.end(60) == ("", "SIGINT: stopped at once\n")
    assert asked.process.returncode == 1


@pytest.mark.slow
def test_after_the_last_update_the_report_is_written(
    data: Path, tmp_path: Path, start: Callable[[list[str]], Started]
) -> None:
    out = tmp_path / "run"
    run = start(command(data, out, "--devices", "2", epochs="4ba"))
    assert run.process.stdout is not None and run.process.stderr is not None
    assert any(line.startswith("test accuracy") for line in run.process.stdout)
    run.process.send_signal(signal.SIGINT)
    rest = run.process.stdout.read()
    assert run.process.wait(60) == 0, run.process.stderr.read()
    assert f"report: {out}" in rest and (out / "report.html").exists()
