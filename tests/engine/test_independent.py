"""Calls without a rule of their own stay divided along the dimensions that they do not mix."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.engine.network import network_of
from convoy.plans.traffic import transfer_traffic
from ranks import run_ranks

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "normalize": lambda x: F.normalize(x, dim=1),
    "flip": lambda x: x.flip(3),
    "cumsum": lambda x: x.cumsum(2),
    "roll": lambda x: x.roll((1, 1), (2, 3)),
    "sort": lambda x: x.sort(3)[0],
    "topk": lambda x: x.topk(2, dim=2)[0],
    "std": lambda x: x / (x.std((2, 3), keepdim=True) + 1),
    "repeat": lambda x: x.repeat_interleave(2, dim=2),
    "patches": lambda x: F.fold(F.unfold(x, 3), (6, 6), 3),
    "windows": lambda x: x.unfold(2, 3, 1).mean(-1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x * 2, x + 1),
    "one head's keys": lambda x: F.scaled_dot_product_attention(x, x[:, :1], x[:, 1:2] + 1),
}
BIASED = {"a bias": (1, 4, 6, 6), "one bias": (6, 6), "each head's bias": (4, 6, 6)}
"""Attention with a parameter of some shape as its mask."""
ALONG_CHANNELS = {"flip", "cumsum", "roll", "sort", "topk", "std", "repeat", "windows", "attention", *BIASED}
"""Those that each channel has by itself."""


class Between(nn.Module):
    """One of the calls between two convolutions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.last = nn.Conv2d(4, 5, 3)
        self.kind = kind
        self.bias = nn.Parameter(torch.randn(BIASED[kind])) if kind in BIASED else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.bias is None:
            x = CALLS[self.kind](x)
        else:
            x = F.scaled_dot_product_attention(x, x * 2, x + 1, attn_mask=self.bias * 2)
        return self.last(F.pad(x, (0, 0, 0, 3))).mean((2, 3))


def run(kind: str, plan: str, samples: int) -> tuple[float, int]:
    """The worst error, and the bytes that are sent for the call."""
    torch.manual_seed(0)
    serial = Between(kind).double()
    net = convoy.parallelize(copy.deepcopy(serial), plan, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
    x = torch.randn(samples, 3, 8, 8, dtype=torch.float64)
    y = torch.randn(samples, 5, dtype=torch.float64)
    mine = convoy.local_samples(net, samples)
    inputs = {"serial": x.clone().requires_grad_(), "net": x[mine].clone().requires_grad_()}
    F.mse_loss(serial(inputs["serial"]), y).backward()
    F.mse_loss(net(inputs["net"]), y[mine]).backward()
    got = {**convoy.gradients(net), "input": inputs["net"].grad}
    want = {name: p.grad for name, p in serial.named_parameters()} | {"input": inputs["serial"].grad[mine]}
    largest = max(gradient.abs().max() for gradient in want.values() if gradient.numel())
    error = max(((got[n] - want[n]).abs().max() / largest).item() for n in want if want[n].numel())
    placement = network_of(net).example_placement(True)
    own = {call.name for call in placement.graph.calls if call.op == "opaque"}
    assert own
    sent = [each for each in transfer_traffic(placement) if each.call in own]
    return error, sum(rank.forward for each in sent for rank in each.ranks)


@pytest.mark.parametrize("kind", [*CALLS, *BIASED])
def test_samples_stay_where_they_are(kind: str) -> None:
    for error, sent in run_ranks(run, 2, kind, "sample=2", 5):
        assert error < 1e-12
        assert sent == 0


@pytest.mark.parametrize("kind", [*CALLS, *BIASED])
def test_channels_stay_where_they_are_unless_they_are_mixed(kind: str) -> None:
    for error, sent in run_ranks(run, 2, kind, "filter=2", 3):
        assert error < 1e-12
        assert (sent == 0) == (kind in ALONG_CHANNELS)


@pytest.mark.parametrize("kind", ["attention", "a bias", "cumsum", "patches", "normalize"])
def test_rows_and_ranks_without_samples(kind: str) -> None:
    for plan, samples in (("height=2", 3), ("sample=2", 1)):
        assert max(error for error, _ in run_ranks(run, 2, kind, plan, samples)) < 1e-12
