"""The peers train together, by a group whose ranks meet on one address."""

import os

import pytest
import torch
from torch import nn

from convoy.bench.configuration import missing
from convoy.bench.measure import wrap
from convoy.bench.processes import RankSlot, Say, run_ranks
from emulated_hosts import listening


def backward(kind: str, say: Say) -> tuple[set[str], list[float]]:
    """Addresses on which a rank listens then, and its gradients with and without exchange."""
    before = listening([os.getpid()])
    model, device = nn.Linear(1, 1, bias=False), torch.device("cpu")
    wrapped = wrap(kind, model, torch.optim.SGD(model.parameters()), 2, device)
    addresses = {address for address, _ in listening([os.getpid()]) - before}
    x = torch.tensor([[1.0 + int(os.environ["RANK"])]])
    gradients = []
    for exchanged in (True, False):
        wrapped.optimizer.zero_grad()
        if exchanged:
            wrapped.backward(wrapped.network(x).sum())
        else:
            with wrapped.unfinished():
                wrapped.backward(wrapped.network(x).sum())
        assert model.weight.grad is not None
        gradients.append(float(model.weight.grad))
    return addresses, gradients


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fabric", "accelerate"])
def test_ranks_listen_on_one_address_and_exchange_gradients(kind: str) -> None:
    if missing(kind) is not None:
        pytest.skip(f"{missing(kind)} is not installed")
    found = run_ranks(backward, [RankSlot(rank, 2) for rank in range(2)], kind)
    assert [gradients for _, gradients in found] == [[1.5, 1.0], [1.5, 2.0]]
    assert [addresses for addresses, _ in found] == [{"127.0.0.1"}] * 2
