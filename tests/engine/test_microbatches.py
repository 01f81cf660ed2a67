"""What lets several microbatches run in one pass is seen in a network."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.engine.coupling import probe

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.between, self.drop = between or nn.Identity(), nn.Dropout(0.3)
        self.head = nn.Linear(6 * 8 * 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.between(F.relu(self.norm(self.conv(x)))).flatten(1)))


class Between(nn.Module):
    """Does a function of itself and the activation."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def dropping() -> nn.Module:
    return Between(lambda net, x: F.dropout(x, 0.1, net.training))


def centered() -> nn.Module:
    return Between(lambda net, x: x - x.mean(0, keepdim=True))


def by_trial(dim: int) -> nn.Module:
    """By a call that no rule covers, along a dimension."""
    return Between(lambda net, x: torch.fft.fft(x, dim=dim).real)


PROBES: list[tuple[nn.Module, bool, bool | None, bool | None]] = [
    # what is between, whether it draws, whether samples stay apart, whether the engine owns what is drawn
    (nn.Identity(), False, True, True),
    (dropping(), True, True, True),
    (nn.Sequential(dropping(), centered()), True, False, False),
    (centered(), False, False, None),
    (by_trial(-1), False, True, None),
    (by_trial(0), False, False, None),
    (Between(lambda net, x: x * torch.empty(1, 1, 1, 1).bernoulli_(0.5) if net.training else x), True, None, False),
    (Between(lambda net, x: x + torch.randn_like(x) if net.training else x), True, None, False),
]


def test_a_probe_sees_what_a_merged_pass_would_change_and_changes_nothing() -> None:
    for number, (between, draws, separable, owned) in enumerate(PROBES):
        torch.manual_seed(0)
        model = Net(copy.deepcopy(between)).eval()
        before, state = {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.get_rng_state()
        found = probe(model, (3, 8, 8), CPU)
        assert found.draws == draws, number
        assert separable is None or found.separable == separable, number
        assert owned is None or not draws or found.owned == owned, number
        assert (found.merge((32,) * 4, CPU, 2.0**40) == 4) == (found.separable and (not draws or found.owned)), number
        assert not model.training and torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    layer = nn.Dropout(0.1)
    for second, draws in ((layer, True), (nn.Dropout(0.1), False)):  # a layer that runs twice
        assert probe(Net(nn.Sequential(layer, nn.ReLU(), second)), (3, 8, 8), CPU).draws == draws
