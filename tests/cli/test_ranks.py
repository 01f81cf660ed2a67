"""What reaches a run on several real processes from outside: ranks that die or stand still, signals, other users, the
end of a terminal, a folder or processes that go away. It ends as if nothing had happened, or says why."""

import json
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.calls import UPDATES
from emulated_hosts import listening
from processes import alive, family, variable
from started import Started, command, curve, digest, finish, resume, steps, wait_for

pytestmark = pytest.mark.slow
Start = Callable[[list[str]], Started]


def status(out: Path) -> str:
    return str(json.loads((out / "summary.json").read_text())["status"])


def hit(run: Started, rank: int, number: signal.Signals, out: Path, after: int) -> None:
    """Send a rank a signal once so many updates are done, and wait until others run in the place of all, or none."""
    wait_for(lambda: steps(out) >= after and rank in run.ranks(), 120)
    before = set(run.ranks().values())
    os.kill(run.ranks()[rank], number)
    wait_for(lambda: len(set(run.ranks().values()) - before) == len(before) or run.process.poll() is not None, 120)


@pytest.mark.timeout(600)
def test_ranks_that_stand_still_are_replaced_and_the_run_goes_on(
    serial: Path, data: Path, tmp_path: Path, start: Start
) -> None:
    out = tmp_path / "run"
    options = ("--devices", "2", "--max-restarts", "1", "--timeout", "5s", "--set", "checkpoint.every=3ba")
    run = start(command(data, out, *options, epochs=UPDATES))
    hit(run, 1, signal.SIGSTOP, out, 4)
    wait_for(lambda: steps(out) >= 9, 120)
    ranks = run.ranks()
    os.kill(ranks[1], signal.SIGTERM)
    output, errors = run.end(90)
    assert run.process.returncode == 1, output + errors
    *before, last = errors.splitlines()
    (first,) = (line for line in before if "all ranks start again (restart 1 of 1)" in line)
    assert " has not moved for " in errors and "held up by rank 1 on host " in errors, first
    assert last.startswith("rank 1 failed: it was ended by SIGTERM") and "goes on from the newest checkpoint" in last
    assert output.count("going on after") == 1
    assert not any(map(alive, ranks.values()))
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", last)

    finish(resume(out, "--devices", "3", "--shares", "3,3,2"))
    assert not list(out.rglob("*.tmp"))
    assert digest(out) == digest(serial)
    assert curve(out) == curve(serial)
    assert (out / "evaluation.json").read_text() == (serial / "evaluation.json").read_text()
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["error"], summary["devices"]) == ("finished", None, 3)


def test_a_mistake_on_one_rank_is_said_once_and_not_repeated(data: Path, tmp_path: Path) -> None:
    options = ("--devices", "2", "--max-restarts", "3")
    errors = finish(command(data, tmp_path / "run", *options, model="failing:Mistaken"), 2).stderr
    assert errors == "convoy: rank 1 finds the data wanting: mend it\n"
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


def test_nobody_finds_a_store_and_a_run_outlives_its_terminal(data: Path, tmp_path: Path, start: Start) -> None:
    out = tmp_path / "run"
    run = start(["nohup", *command(data, out, "--devices", "2", epochs="4000ba")])
    wait_for(lambda: steps(out) >= 2, 120)
    assert listening([run.process.pid]) == set()
    ports = listening(family(run.process.pid))
    assert {address for address, _ in ports} == {"127.0.0.1"}  # gloo's
    pids = (run.process.pid, *run.ranks().values())
    launcher, *ranks = (int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in pids)
    assert min(ranks) > launcher  # which is left to say so where memory lacks
    folder = Path(variable(run.ranks()[0], "CONVOY_LAUNCH") or "")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert variable(run.ranks()[0], "CONVOY_STORE") == str(folder / "store") and (folder / "store").exists()
    run.process.send_signal(signal.SIGHUP)
    time.sleep(1)
    before = steps(out)
    wait_for(lambda: steps(out) > before, 30)
    shutil.rmtree(folder)
    run.process.send_signal(signal.SIGTERM)
    output, errors = run.end(60)
    assert (run.process.returncode, errors) == (1, ""), output + errors
    assert "SIGTERM: stopped and saved after" in output and status(out) == "stopped"


KILLED = "rank 0 failed: it was ended by SIGKILL; the machine may be out of memory; nothing was "
ENDS = {
    "ctrl-c": (None, signal.SIGINT, 0, "SIGINT: stopped at once, without saving\n"),
    "killed": (0, signal.SIGKILL, 0, KILLED),
    "launcher killed": (None, signal.SIGKILL, 1, ""),
}
"""To which rank, or the launcher; what, and after how many updates; and how it is said."""


@pytest.mark.parametrize("end", ENDS)
def test_what_ends_without_saving_says_so_and_nothing_is_left(
    data: Path, tmp_path: Path, start: Start, end: str
) -> None:
    rank, number, after, sentence = ENDS[end]
    out = tmp_path / "run"
    run = start(command(data, out, "--devices", "2", "--workers", str(after), epochs="4000ba"))
    wait_for(lambda: len(run.ranks()) == 2 and steps(out) >= after, 120)
    everyone = family(run.process.pid)[1:]
    os.kill(run.process.pid if rank is None else run.ranks()[rank], number)
    errors = run.end(60)[1]
    assert errors.startswith(sentence) and errors.count("\n") == bool(sentence)
    assert run.process.returncode == (1 if sentence else -number)
    assert out.exists() or not after
    wait_for(lambda: not any(map(alive, everyone)), 30)
