"""What reaches a run on several real processes from outside: ranks that die or stand still, signals, other users, the
end of a terminal, a folder or processes that go away. It ends as if nothing had happened, or says why."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from cli.calls import UPDATES
from emulated_hosts import listening
from processes import alive, children, family, variable
from started import ENVIRONMENT, Started, command, curve, digest, finish, resume, steps, wait_for
from tiny import write_pictures

pytestmark = pytest.mark.slow
Start = Callable[[list[str]], Started]

OUTSIDER = """
import os, sys, threading, time
from datetime import timedelta
from torch.distributed import TCPStore
def ask(port):
    TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5)).set("key", "value")
    print(port, flush=True)
for port in sys.argv[1:]:
    threading.Thread(target=ask, args=(int(port),), daemon=True).start()
time.sleep(4)
os._exit(0)
"""


def answering(ports: list[int]) -> list[int]:
    """Which of some ports serve a key-value store to whoever asks."""
    line = [sys.executable, "-c", OUTSIDER, *map(str, ports)]
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    return [int(word) for word in done.stdout.split()]


def status(out: Path) -> str:
    return str(json.loads((out / "summary.json").read_text())["status"])


def hit(run: Started, rank: int, number: signal.Signals, out: Path, after: int) -> None:
    """Send a rank a signal once so many updates are done, and wait until others run in the place of all, or none."""
    wait_for(lambda: steps(out) >= after and rank in run.ranks(), 120)
    before = set(run.ranks().values())
    os.kill(run.ranks()[rank], number)
    wait_for(lambda: len(set(run.ranks().values()) - before) == len(before) or run.process.poll() is not None, 120)


@pytest.mark.timeout(600)
def test_ranks_that_stand_still_are_replaced_and_a_run_goes_on_on_other_devices_as_on_one(
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

    done, again = steps(out), start(resume(out))
    wait_for(lambda: steps(out) > done or again.process.poll() is not None, 120)
    again.process.send_signal(signal.SIGHUP)  # of a terminal that is closed
    output, errors = again.end(60)
    assert (again.process.returncode, errors) == (1, ""), output + errors
    assert "SIGHUP: stopped and saved after" in output and status(out) == "stopped" and steps(out) < 60
    finish(resume(out, "--devices", "3", "--shares", "3,3,2"))
    assert not list(out.rglob("*.tmp"))
    assert digest(out) == digest(serial)
    assert curve(out) == curve(serial)
    assert (out / "evaluation.json").read_text() == (serial / "evaluation.json").read_text()
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["error"], summary["devices"]) == ("finished", None, 3)


@pytest.mark.parametrize(
    ("model", "restarts", "status", "beginning"),
    [
        ("failing:Failing", 0, 1, "rank 1 failed: KeyError: 'the odd key' (failing.py, line 22, in train)\nTraceback"),
        ("failing:Mistaken", 3, 2, "convoy: rank 1 finds the data wanting: mend it\n"),  # which is not repeated
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


def test_nobody_finds_a_store_and_a_run_by_nohup_outlives_its_terminal_and_the_folder_of_its_launcher(
    data: Path, tmp_path: Path, start: Start
) -> None:
    out = tmp_path / "run"
    run = start(["nohup", *command(data, out, "--devices", "2", epochs="4000ba")])
    wait_for(lambda: steps(out) >= 2, 120)
    assert listening([run.process.pid]) == set()
    ports = listening(family(run.process.pid))
    assert {address for address, _ in ports} == {"127.0.0.1"}  # gloo's
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
        assert answering([*(port for _, port in ports), port]) == [port]
        del store
    pids = (run.process.pid, *run.ranks().values())
    launcher, *ranks = (int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in pids)
    assert min(ranks) > launcher  # which is left to say so where memory lacks
    folder = Path(variable(run.ranks()[0], "CONVOY_LAUNCH") or "")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    run.process.send_signal(signal.SIGHUP)
    time.sleep(1)
    before = steps(out)
    wait_for(lambda: steps(out) > before, 30)
    shutil.rmtree(folder)
    run.process.send_signal(signal.SIGTERM)
    output, errors = run.end(60)
    assert (run.process.returncode, errors) == (1, ""), output + errors
    assert "SIGTERM: stopped and saved after" in output and status(out) == "stopped"


ENDS = [
    (None, signal.SIGINT, 0, "SIGINT: stopped at once, without saving"),
    (None, signal.SIGQUIT, 1, "SIGQUIT: stopped at once"),
    (
        0,
        signal.SIGKILL,
        0,
        "rank 0 failed: it was ended by SIGKILL; the machine may be out of memory; nothing was saved yet",
    ),
]
"""To which rank, or the launcher; what, and after how many updates; and what is said."""


@pytest.mark.parametrize(("rank", "number", "after", "sentence"), ENDS, ids=["ctrl-c", "quit", "killed"])
def test_what_ends_without_saving_says_by_what(
    data: Path, tmp_path: Path, start: Start, rank: int | None, number: int, after: int, sentence: str
) -> None:
    out = tmp_path / "run"
    run = start(command(data, out, "--devices", "2", epochs="4000ba"))
    wait_for(lambda: len(run.ranks()) == 2 and steps(out) >= after, 120)
    os.kill(run.process.pid if rank is None else run.ranks()[rank], number)
    assert run.end(60)[1] == f"{sentence}\n"
    assert run.process.returncode == 1
    assert out.exists() or not after


def test_nothing_outlives_the_starting_process(data: Path, tmp_path: Path, start: Start) -> None:
    out = tmp_path / "run"
    run = start(command(data, out, "--devices", "2", "--workers", "1", epochs="4000ba"))
    wait_for(lambda: steps(out) >= 1, 180)
    everyone = family(run.process.pid)[1:]
    assert len(everyone) > 2
    run.process.kill()
    run.process.wait()
    wait_for(lambda: not any(map(alive, everyone)), 30)


def test_a_folder_that_is_removed_is_not_made_anew(data: Path, tmp_path: Path, start: Start) -> None:
    """Nor with restarts left: the run would begin anew in silence."""
    out = tmp_path / "run"
    options = ("--devices", "2", "--max-restarts", "2", "--set", "evaluate_every=100000ba")
    run = start(command(data, out, *options, epochs="100000ba"))
    wait_for(lambda: steps(out) > 1, 120)
    shutil.rmtree(out)
    errors = run.end(60)[1]
    assert run.process.returncode == 1
    assert f"{out} is not the folder any more that this run writes to" in errors.splitlines()[-1]
    assert "it was removed; nothing is there now" in errors and "start again" not in errors
    assert not out.exists()


def loaders(pid: int) -> list[int]:
    """The last ones of the tree below a process: those that the server of its workers has made."""
    below = children(pid)
    if below:
        return [each for child in below for each in loaders(child)]
    return [pid] if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes() else []


def test_processes_that_load_and_are_stopped_are_named_and_do_not_stay(tmp_path: Path, start: Start) -> None:
    out, data = tmp_path / "run", write_pictures(tmp_path / "data", size=(90, 70))
    options = ["--timeout", "6s", "--workers", "2", "--set", "evaluate_every=100000ba"]
    options += ["--set", "data.image_size=28", "--set", "data.resize=32"]
    run = start(command(data, out, *options, epochs="100000ba"))
    wait_for(lambda: steps(out) > 1, 120)
    pids = loaders(run.process.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    errors = run.end(60)[1]
    assert run.process.returncode == 1
    first = next(line for line in errors.splitlines() if "moved for" in line)
    assert "(--timeout): update " in first and "waiting for data (process " in first
    assert any(f"process {pid}, which is stopped, has not " in first for pid in pids) and " train/" in first
    assert status(out) == "failed"
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10)
