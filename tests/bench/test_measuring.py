"""What measures: the ranks' processes, a stopwatch by a clock that the test moves, peers, and the planner's row."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
from torch import nn

from convoy.bench.ask import missing
from convoy.bench.measure import wrap
from convoy.bench.processes import Places, RankFailed, Say, run_ranks
from convoy.errors import ConvoyError
from convoy.resources import pin
from emulated_hosts import listening
from processes import alive
from started import wait_for
from tiny import write_mnist


def backward(kind: str, say: Say) -> tuple[list[int], int, set[str], list[float]]:
    """A rank's cores and threads, the addresses on which it listens, its gradients with and without an exchange."""
    say("here", 1, 2)
    before = listening([os.getpid()])
    model, device = nn.Linear(1, 1, bias=False), torch.device("cpu")
    wrapped = wrap(kind, model, torch.optim.SGD(model.parameters()), 2, device)
    addresses = {address for address, _ in listening([os.getpid()]) - before}
    x = torch.tensor([[1.0 + int(os.environ["RANK"])]])
    gradients = []
    for exchange in (nullcontext(), wrapped.unfinished()):
        wrapped.optimizer.zero_grad()
        with exchange:
            wrapped.backward(wrapped.network(x).sum())
        assert model.weight.grad is not None
        gradients.append(float(model.weight.grad))
    return sorted(os.sched_getaffinity(0)), torch.get_num_threads(), addresses, gradients


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fabric", "accelerate"])
def test_ranks_have_cores_listen_on_one_address_and_exchange_gradients(kind: str) -> None:
    if missing(kind) is not None:
        pytest.skip(f"{missing(kind)} is not installed")
    cores = sorted(os.sched_getaffinity(0))
    places = [partial(pin, [core]) for core in (cores[0], cores[-1])]
    heard: list[tuple[str, int, int]] = []
    results = run_ranks(backward, places, kind, say=lambda *what: heard.append(what))
    gradients = [[1.5, 1.0], [1.5, 2.0]]
    assert results == [([core], 1, {"127.0.0.1"}, gradients[rank]) for rank, core in enumerate((cores[0], cores[-1]))]
    assert heard == [("here", 1, 2)]


def fail(how: str, say: Say) -> None:
    print("to the standard output", flush=True)
    if how == "mistake":
        raise ConvoyError("the plan is wrong: mend it")
    if how == "error":
        raise ZeroDivisionError("by nothing")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(100)


@pytest.mark.slow
def test_failures_have_reasons_and_the_standard_output_stays_clean(capfd: pytest.CaptureFixture[str]) -> None:
    for how, kind, words in (
        ("mistake", ConvoyError, "mend it"),
        ("error", RankFailed, "rank 0 failed: ZeroDivisionError: by nothing"),
        ("killed", RankFailed, "rank 0 was ended by SIGKILL; the machine may be out of memory"),
        ("hang", RankFailed, "did not come back in time"),
    ):
        with pytest.raises(kind, match=words):
            run_ranks(fail, Places(0).of(1), how, seconds=1.0 if how == "hang" else 60.0)
    run_ranks(fail, Places(0).of(1), "not", quiet=True)
    assert capfd.readouterr().out == ""


def test_an_interrupt_while_a_rank_starts_stays_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(process: ForkServerProcess) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ForkServerProcess, "start", start)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(fail, Places(0).of(1), "not")


STARTS_A_RANK = """
import multiprocessing, os, sys, time
from pathlib import Path
from convoy.bench.processes import Places, run_ranks
from convoy.data import DataConfig, Order, open_data, training_batches

def load_pictures(folder, say):
    config = DataConfig(path=str(folder), workers=1)
    data = open_data(config)
    batches = training_batches(data, config, Order(len(data.train), 8, 0), first_update=0, num_updates=9, seed=0)
    next(batches)
    numbers = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    (folder / "unfinished").write_text(" ".join(map(str, numbers)))
    (folder / "unfinished").rename(folder / "numbers")
    time.sleep(100)

if __name__ == "__main__":
    run_ranks(load_pictures, Places(0).of(1), Path(sys.argv[1]))
"""
"""Its rank hangs while a process loads pictures for it, whose number is written beside its own."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_nothing_outlives_whoever_started_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(STARTS_A_RANK)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    runs = {}
    try:
        for end in (signal.SIGKILL, signal.SIGINT):
            line = [sys.executable, str(tmp_path / "starts.py"), str(write_mnist(tmp_path / end.name))]
            runs[end] = subprocess.Popen(line, env=environment)
        for end, process in runs.items():
            numbers = tmp_path / end.name / "numbers"
            wait_for(lambda numbers=numbers, process=process: numbers.exists() or process.poll() is not None, 100)
            ranks = list(map(int, numbers.read_text().split()))
            assert len(ranks) > 1 and all(map(alive, ranks))
            process.send_signal(end)
            process.wait(30)
            wait_for(lambda ranks=ranks: not any(map(alive, ranks)), 30)
    finally:
        for process in runs.values():
            process.kill()
            process.wait(30)
