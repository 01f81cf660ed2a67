"""What measures: the ranks' processes, a stopwatch by a clock that the test moves, peers, and the planner's row."""

import os
import signal
import time
from contextlib import nullcontext
from functools import partial
from multiprocessing.context import ForkServerProcess

import pytest
import torch
from torch import nn

from convoy.bench.ask import missing
from convoy.bench.measure import wrap
from convoy.bench.processes import Places, RankFailed, Say, run_ranks
from convoy.errors import ConvoyError
from convoy.resources import pin
from emulated_hosts import listening


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
