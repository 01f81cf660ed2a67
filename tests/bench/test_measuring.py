"""What measures: the ranks' processes, a stopwatch by a clock that the test moves, peers, and the planner's row."""

import os
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from convoy.bench.ask import missing
from convoy.bench.measure import wrap
from convoy.bench.processes import Say, run_ranks
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
