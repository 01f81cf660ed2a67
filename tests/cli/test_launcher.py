"""What reaches a run on two devices of this host from outside: other users, signals, the end of a terminal, and what
cleans the temporary directory."""

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

from emulated_hosts import listening
from processes import family, variable
from started import ENVIRONMENT, Started, command, steps, wait_for
from tiny import write_mnist

pytestmark = pytest.mark.slow

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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("launcher") / "data")


@pytest.fixture
def long(data: Path, tmp_path: Path) -> list[str]:
    return command(data, tmp_path / "run", epochs="4000ba")


def status(out: Path) -> str:
    return str(json.loads((out / "summary.json").read_text())["status"])


def test_nobody_finds_a_store_and_without_its_folder_the_launcher_still_tells_its_ranks(
    long: list[str], tmp_path: Path, start: Callable[[list[str]], Started]
) -> None:
    run = start([*long, "--devices", "2"])
    wait_for(lambda: steps(tmp_path / "run") >= 2, 120)
    pids = family(run.process.pid)
    assert listening([run.process.pid]) == set()
    found = listening(pids)
    assert {address for address, _ in found} == {"127.0.0.1"}  # gloo's
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mine = listener.getsockname()[1]
        kept = dist.TCPStore(
            "127.0.0.1", mine, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
        assert answering([*(port for _, port in found), mine]) == [mine]
        del kept
    scores = [Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in (run.process.pid, *run.ranks().values())]
    assert all(
        int(score) > int(scores[0]) for score in scores[1:]
    )  # where memory lacks, the launcher is left to say so
    folder = Path(variable(run.ranks()[0], "CONVOY_LAUNCH") or "")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    shutil.rmtree(folder)
    run.process.send_signal(signal.SIGTERM)
    output, errors = run.end(60)
    assert (run.process.returncode, errors) == (1, ""), output + errors
    assert "SIGTERM: stopped and saved after" in output and status(tmp_path / "run") == "stopped"


@pytest.mark.parametrize("devices", ["1", "2"])
def test_a_terminal_that_is_closed_stops_the_run_and_it_saves(
    long: list[str], tmp_path: Path, devices: str, start: Callable[[list[str]], Started]
) -> None:
    run = start([*long, "--devices", devices])
    wait_for(lambda: steps(tmp_path / "run") >= 2, 120)
    run.process.send_signal(signal.SIGHUP)
    output, errors = run.end(60)
    assert (run.process.returncode, errors) == (1, ""), output + errors
    assert "SIGHUP: stopped and saved after" in output and status(tmp_path / "run") == "stopped"


def test_who_asked_for_no_end_by_the_terminal_has_none(long: list[str], tmp_path: Path) -> None:
    """`nohup` has the launcher, and so its ranks, ignore it."""
    run = subprocess.Popen(
        ["nohup", *long, "--devices", "2"], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        wait_for(lambda: steps(tmp_path / "run") >= 2, 120)
        run.send_signal(signal.SIGHUP)
        time.sleep(1)
        seen = steps(tmp_path / "run")
        wait_for(lambda: steps(tmp_path / "run") > seen, 30)
        run.send_signal(signal.SIGTERM)
        assert "SIGTERM: stopped and saved after" in run.communicate(timeout=60)[0]
    finally:
        run.kill()
        run.communicate()


@pytest.mark.parametrize(
    ("to_rank", "number", "said"),
    [
        (True, signal.SIGTERM, "rank 1 failed: it was ended by SIGTERM; nothing was saved yet\n"),
        (False, signal.SIGQUIT, "SIGQUIT: stopped at once\n"),
    ],
)
def test_what_ends_without_saving_says_by_what(
    long: list[str], start: Callable[[list[str]], Started], to_rank: bool, number: int, said: str
) -> None:
    run = start([*long, "--devices", "2"])
    wait_for(lambda: len(run.ranks()) == 2, 60)
    wait_for(lambda: steps(Path(long[-1])) >= 1, 120)
    os.kill(run.ranks()[1] if to_rank else run.process.pid, number)
    assert run.end(60)[1] == said
    assert run.process.returncode == 1
