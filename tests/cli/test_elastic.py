"""Ranks that die are started again, and the run ends as if nothing had happened. Real processes."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.calls import UPDATES
from processes import alive
from started import Started, command, curve, digest, finish, resume, steps, wait_for

pytestmark = pytest.mark.slow
Start = Callable[[list[str]], Started]


def hit(run: Started, rank: int, number: signal.Signals, out: Path, after: int) -> None:
    """Send a rank a signal once so many updates are done, and wait until others run in the place of all, or none."""
    wait_for(lambda: steps(out) >= after and rank in run.ranks(), 120)
    before = set(run.ranks().values())
    os.kill(run.ranks()[rank], number)
    wait_for(lambda: len(set(run.ranks().values()) - before) == len(before) or run.process.poll() is not None, 120)


@pytest.mark.timeout(300)
def test_ranks_that_are_killed_or_stand_still_are_replaced_while_restarts_are_left_and_the_run_can_be_gone_on_with(
    serial: Path, data: Path, tmp_path: Path, start: Start
) -> None:
    out = tmp_path / "run"
    options = ("--devices", "2", "--max-restarts", "2", "--timeout", "5s", "--set", "checkpoint.every=3ba")
    run = start(command(data, out, *options, epochs=UPDATES))
    hit(run, 1, signal.SIGKILL, out, 5)
    hit(run, 1, signal.SIGSTOP, out, 12)
    wait_for(lambda: steps(out) >= 20, 120)
    ranks = run.ranks()
    os.kill(ranks[0], signal.SIGKILL)
    output, errors = run.end(90)
    assert run.process.returncode == 1, output + errors
    first, *middle, last = errors.splitlines()
    again = "all ranks start again (restart"
    assert first == f"rank 1 failed: it was killed, or ended without a word; {again} 1 of 2)"
    (second,) = (line for line in middle if again in line)
    assert " has not moved for " in errors and "held up by rank 1 on host " in errors and f"{again} 2 of 2)" in second
    assert last.startswith("rank 0 failed: it was ended by SIGKILL") and "goes on from the newest checkpoint" in last
    assert output.count("going on after") == 2
    assert not any(map(alive, ranks.values()))
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", last)
    finish(resume(out))
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("finished", None)
    assert not list(out.rglob("*.tmp"))
    assert digest(out) == digest(serial)
    assert curve(out) == curve(serial)


@pytest.mark.parametrize(
    ("model", "restarts", "status", "beginning"),
    [
        ("failing:Failing", 0, 1, "rank 1 failed: KeyError: 'the odd key' (failing.py, line 22, in train)\nTraceback"),
        ("failing:Mistaken", 3, 2, "convoy: rank 1 finds the data wanting: mend it\n"),  # which is not repeated
        ("failing:Lacking", 0, 2, "convoy: rank 1 ran out of memory (before the first update"),
    ],
)
def test_a_failure_on_one_rank_is_said_once(
    data: Path, tmp_path: Path, model: str, restarts: int, status: int, beginning: str
) -> None:
    options = ("--devices", "2", "--max-restarts", str(restarts))
    errors = finish(command(data, tmp_path / "run", *options, model=model), status).stderr
    assert errors.startswith(beginning), errors
    assert errors.count("failed: ") == (status == 1) and (status == 1 or errors.count("\n") == 1)
    assert not (tmp_path / "run").exists()


def test_under_torchrun_a_run_is_known_again(serial: Path, data: Path, tmp_path: Path, start: Start) -> None:
    out = tmp_path / "run"
    arguments = command(data, out, "--set", "checkpoint.every=3ba", epochs=UPDATES)[1:]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = start([*torchrun, "--max-restarts", "2", *arguments])
    hit(run, 1, signal.SIGKILL, out, 5)
    output, errors = run.end(90)
    assert run.process.returncode == 0, output + errors
    assert "going on after" in output
    assert digest(out) == digest(serial)
