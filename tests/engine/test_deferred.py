"""Networks built within `convoy.deferred()`: rank 0 has the numbers, and every rank gets the parts of a plain one."""

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy import models
from convoy.engine.network import network_of
from convoy.engine.parallelize import own_state
from ranks import run_ranks

EXAMPLE = torch.zeros(2, 3, 32, 32)


class Odd(nn.Module):
    """Ties two layers, keeps a table as a plain attribute, and asks for a number in its forward pass if told to."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        self.conv, self.again, self.fc = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3), nn.Linear(3, 10)
        self.again.weight = self.conv.weight
        self.register_buffer("shift", torch.rand(3))
        self.scale, self.asks = torch.rand(3), asks

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.conv(x)).mean((2, 3)) * self.scale + self.shift
        return self.fc(x + 1 if self.asks and x.sum().item() > -1e9 else x)


BUILD = {"odd": Odd, "asking": lambda: Odd(asks=True), "resnet18": lambda: models.create("resnet18-cifar")}


def state_and_gradients(name: str, plan: str, as_deferred: bool, seed: int = 3) -> tuple[Any, ...]:
    """This rank's part at the start, the gradients of a batch, and torch's random state after `parallelize`."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(seed + rank * as_deferred)  # the seed of rank 0 counts
    if as_deferred:
        with convoy.deferred():
            model = BUILD[name]()
        assert all(p.is_meta for p in model.parameters()) is (rank > 0)
        assert model.conv is not model.again if isinstance(model, Odd) else True
    else:
        model = BUILD[name]()
    after = torch.get_rng_state()
    net = convoy.parallelize(model, plan, EXAMPLE)
    if isinstance(model, Odd):
        assert model.conv.weight is model.again.weight
        assert network_of(net).captured.startswith("whole on every rank") is model.asks
    start = {key: tensor.detach().clone() for key, tensor in own_state(net).items()}
    torch.manual_seed(0)
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    mine = convoy.local_samples(net, 4)
    F.cross_entropy(net(images[mine]), labels[mine]).backward()
    return start, convoy.gradients(net), {"": after}


def differences(name: str, plan: str, seed: int = 3) -> list[str]:
    plain, lean = state_and_gradients(name, plan, False), state_and_gradients(name, plan, True, seed)
    return [
        f"{what} {key}"
        for what, one, other in zip(("start", "gradient", "random state"), plain, lean, strict=True)
        for key in one.keys() | other.keys()
        if not (torch.equal(one[key], other[key]) and one[key].stride() == other[key].stride())
    ]


def test_parts_are_those_of_a_plain_network_with_the_numbers_of_rank_0() -> None:
    for name, plan in [("odd", "filter=2"), ("asking", "sample=2"), ("resnet18", "stage=2")]:
        assert run_ranks(differences, 2, name, plan) == [[], []], name
    for different in run_ranks(differences, 2, "odd", "filter=2", 4):  # the seed that rank 1 had
        assert {text.partition(" ")[0] for text in different} == {"start", "gradient", "random"}
