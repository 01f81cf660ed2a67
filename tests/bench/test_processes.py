"""Processes of a measurement: their places, and how they fail."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from convoy.bench.processes import RankFailed, RankSlot, Say, run_ranks
from convoy.comm.joining import join
from convoy.data import DataConfig, Order, open_data, training_batches
from convoy.errors import ConvoyError
from processes import alive
from started import wait_for
from tiny import write_mnist


def slots(num: int) -> list[RankSlot]:
    return [RankSlot(rank, num) for rank in range(num)]


def place(factor: int, say: Say) -> tuple[int, list[int], int]:
    say("here", 1, 2)
    join()
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return factor * int(x), sorted(os.sched_getaffinity(0)), torch.get_num_threads()


@pytest.mark.slow
def test_ranks_have_places_and_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))
    slots = [RankSlot(rank, 2, (core,)) for rank, core in enumerate((cores[0], cores[-1]))]
    heard: list[tuple[str, int, int]] = []
    found = run_ranks(place, slots, 10, say=lambda *what: heard.append(what))
    assert found == [(30, [cores[0]], 1), (30, [cores[-1]], 1)]
    assert heard == [("here", 1, 2)]


def mistake(say: Say) -> None:
    raise ConvoyError("the plan is wrong: mend it")


def error(say: Say) -> None:
    raise ZeroDivisionError("by nothing")


def killed(say: Say) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(say: Say) -> None:
    time.sleep(100)


@pytest.mark.slow
def test_failures_have_reasons() -> None:
    with pytest.raises(ConvoyError, match="mend it"):
        run_ranks(mistake, slots(1))
    with pytest.raises(RankFailed, match="rank 0 failed: ZeroDivisionError: by nothing"):
        run_ranks(error, slots(1))
    with pytest.raises(RankFailed, match="rank 0 was ended by SIGKILL; the machine may be out of memory"):
        run_ranks(killed, slots(1))
    with pytest.raises(RankFailed, match="did not come back in time"):
        run_ranks(hang, slots(1), seconds=1.0)


def talk(say: Say) -> None:
    print("to the standard output", flush=True)
    print("to the standard error", file=sys.stderr, flush=True)


def test_the_standard_output_stays_clean(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(talk, slots(1))
    run_ranks(talk, slots(1), quiet=True)
    out, _ = capfd.readouterr()
    assert out == ""


def load_pictures(folder: Path, say: Say) -> None:
    """Hang while a process loads pictures, whose number is written beside this one's."""
    config = DataConfig(path=str(folder), workers=1)
    data = open_data(config)
    batches = training_batches(data, config, Order(len(data.train), 8, 0), first_update=0, num_updates=9, seed=0)
    next(batches)
    numbers = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    (folder / "unfinished").write_text(" ".join(map(str, numbers)))
    (folder / "unfinished").rename(folder / "numbers")
    time.sleep(100)


_STARTS_A_RANK = """
import sys
from pathlib import Path
from convoy.bench.processes import RankSlot, run_ranks
from bench.test_processes import load_pictures

if __name__ == "__main__":
    run_ranks(load_pictures, [RankSlot(0, 1)], Path(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_whoever_started_the_ranks(end: signal.Signals, tmp_path: Path) -> None:
    write_mnist(tmp_path / "data")
    (tmp_path / "starts.py").write_text(_STARTS_A_RANK)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    process = subprocess.Popen([sys.executable, str(tmp_path / "starts.py"), str(tmp_path / "data")], env=environment)
    numbers = tmp_path / "data" / "numbers"
    try:
        wait_for(lambda: numbers.exists() or process.poll() is not None, 60)
        rank, *workers = map(int, numbers.read_text().split())
        assert workers and all(map(alive, (rank, *workers)))
    finally:
        process.send_signal(end)
        process.wait(30)
    wait_for(lambda: not any(map(alive, (rank, *workers))), 30)
