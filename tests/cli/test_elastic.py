"""Ranks that die are started again, and the run ends as if nothing had happened. Real processes."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from convoy.cli import main
from processes import children
from started import Started, command, curve, digest, finish, resume, steps, wait_for
from tiny import write_mnist
from whole_runs import as_before

UPDATES = "30ba"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("elastic") / "data")


@pytest.fixture(scope="module")
def serial(data: Path) -> Path:
    finish(command(data, data.parent / "serial", epochs=UPDATES))
    return data.parent / "serial"


def kill(run: Started, rank: int, out: Path, after: int) -> None:
    """SIGKILL a rank once so many updates are done, and wait until others run in its place."""
    wait_for(lambda: steps(out) >= after and rank in run.ranks(), 60)
    before = set(run.ranks().values())
    os.kill(run.ranks()[rank], signal.SIGKILL)
    wait_for(lambda: len(set(run.ranks().values()) - before) == len(before) or run.process.poll() is not None, 60)


@pytest.mark.matrix  # tests/benchmarks/test_chaos.py kills too
def test_killed_ranks_are_started_again(
    serial: Path, data: Path, tmp_path: Path, start: Callable[[list[str]], Started]
) -> None:
    out = tmp_path / "run"
    options = ("--devices", "2", "--max-restarts", "3", "--set", "checkpoint.every=3ba")
    run = start(command(data, out, *options, epochs=UPDATES))
    kill(run, 1, out, 5)
    kill(run, 0, out, 12)
    output, errors = run.end(90)
    assert run.process.returncode == 0, output + errors
    assert errors.splitlines() == [
        "rank 1 failed: it was killed, or ended without a word; all ranks start again (restart 1 of 3)",
        "rank 0 failed: it was killed, or ended without a word; all ranks start again (restart 2 of 3)",
    ]
    assert output.count("going on after") == 2
    assert digest(out) == digest(serial)
    assert curve(out) == curve(serial)
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_a_mistake_is_not_repeated(data: Path, tmp_path: Path) -> None:
    options = ("--devices", "2", "--max-restarts", "3")
    found = finish(command(data, tmp_path / "run", *options, model="failing:Mistaken"), 2)
    assert found.stderr == "convoy: rank 1 finds the data wanting: mend it\n"


@pytest.mark.slow
def test_ranks_that_are_killed_leave_a_summary_that_says_so(
    serial: Path, data: Path, tmp_path: Path, start: Callable[[list[str]], Started]
) -> None:
    out = tmp_path / "run"
    run = start(command(data, out, "--devices", "2", "--set", "checkpoint.every=3ba", epochs=UPDATES))
    kill(run, 0, out, 5)
    _, errors = run.end(90)
    assert run.process.returncode == 1
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["error"] == errors.strip() and summary["error"].startswith("rank 0 failed: it was ended by SIGKILL")
    assert "goes on from the newest checkpoint" in summary["error"]
    finish(resume(out, "--devices", "1"))
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("finished", None)
    assert digest(out) == digest(serial)


@pytest.mark.matrix  # tests/data/test_workers.py kills them too
def test_a_process_that_loads_pictures_is_replaced(
    serial: Path, data: Path, tmp_path: Path, start: Callable[[list[str]], Started]
) -> None:
    out = tmp_path / "run"
    options = ("--devices", "2", "--max-restarts", "1", "--set", "checkpoint.every=3ba", "--set", "data.workers=1")
    run = start(command(data, out, *options, epochs=UPDATES))
    wait_for(lambda: steps(out) >= 5, 60)
    servers = [pid for pid in children(run.ranks()[1]) if children(pid)]
    assert len(servers) == 1
    os.kill(children(servers[0])[0], signal.SIGKILL)
    output, errors = run.end(90)
    assert run.process.returncode == 0, output + errors
    assert errors.startswith("rank 1 failed: a process that loads pictures died "), errors
    assert "all ranks start again (restart 1 of 1)" in errors
    assert output.count("going on after") == 1
    assert digest(out) == digest(serial)


@pytest.mark.matrix
def test_an_error_ends_the_run_when_no_restart_is_left(data: Path, tmp_path: Path) -> None:
    options = ("--devices", "2", "--max-restarts", "1")
    found = finish(command(data, tmp_path / "run", *options, model="failing:Failing"), 1)
    why = "rank 1 failed: KeyError: 'the odd key' (failing.py, line 22, in train)"
    assert f"{why}; all ranks start again (restart 1 of 1)" in found.stderr
    assert f"{why}\nTraceback" in found.stderr


@pytest.mark.matrix
def test_under_torchrun_a_run_is_known_again(
    serial: Path, data: Path, tmp_path: Path, start: Callable[[list[str]], Started]
) -> None:
    out = tmp_path / "run"
    arguments = command(data, out, "--set", "checkpoint.every=3ba", epochs=UPDATES)[1:]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = start([*torchrun, "--max-restarts", "2", *arguments])
    kill(run, 1, out, 5)
    output, errors = run.end(90)
    assert run.process.returncode == 0, output + errors
    assert "going on after" in output
    assert digest(out) == digest(serial)


def test_a_run_of_others_is_not_gone_on_with(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with as_before():
        assert main(command(data, out, epochs="2ba")[3:]) == 0
    before = digest(out)
    found = finish(command(data, out, "--devices", "2", "--max-restarts", "2", epochs=UPDATES), 2)
    assert f"{out} already holds a run, which is finished: choose another --out" in found.stderr
    assert digest(out) == before


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_and_replaced(
    serial: Path, data: Path, tmp_path: Path, start: Callable[[list[str]], Started]
) -> None:
    out = tmp_path / "run"
    options = ("--devices", "2", "--max-restarts", "1", "--timeout", "5s")
    run = start(command(data, out, *options, epochs=UPDATES))
    wait_for(lambda: steps(out) >= 5, 60)
    os.kill(run.ranks()[1], signal.SIGSTOP)
    output, errors = run.end(90)
    assert run.process.returncode == 0, output + errors
    assert " has not moved for " in errors and "held up by rank 1 on host " in errors, errors
    assert "all ranks start again (restart 1 of 1)" in errors
    assert digest(out) == digest(serial)
