"""What `parallelize` takes, and the state of a parallelized network in whole tensors."""

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy import models
from convoy.engine.network import network_of
from convoy.engine.parallelize import own_state
from convoy.errors import ConvoyError
from ranks import run_ranks
from small_nets import Dense

EXAMPLE = torch.zeros(2, 3, 8, 8, dtype=torch.float64)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(self.stem(x).mean((2, 3)))))


def parts_of_the_loss(plan: str, loss: Any) -> float:
    """The worst error of the gradient where each rank gives its part of the global loss."""
    torch.manual_seed(0)
    serial = Dense().double()
    net = convoy.parallelize(copy.deepcopy(serial), plan, EXAMPLE, loss=loss)
    x, y = torch.randn(5, 3, 8, 8, dtype=torch.float64), torch.arange(5)
    mine = convoy.local_samples(net, 5)
    F.cross_entropy(serial(x), y).backward()
    (F.cross_entropy(net(x[mine]), y[mine], reduction="sum") / 5).backward()
    got, want = convoy.gradients(net), {name: p.grad for name, p in serial.named_parameters()}
    largest = max(gradient.abs().max() for gradient in want.values())
    return max(((got[name] - want[name]).abs().max() / largest).item() for name in want)


@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "owt=2"])
def test_losses_that_are_parts_of_the_whole_are_taken_as_they_are(plan: str) -> None:
    assert max(run_ranks(parts_of_the_loss, 2, plan, "part")) < 1e-12


def test_losses_that_are_parts_are_not_means() -> None:
    assert min(run_ranks(parts_of_the_loss, 2, "sample=2", "mean")) > 1e-2


def tensors(plan: str) -> None:
    """Whole tensors and parts are each other's way back, under each name of a tied weight."""
    torch.manual_seed(0)
    serial = Tied().double()
    net = convoy.parallelize(copy.deepcopy(serial), plan, EXAMPLE)
    network = network_of(net)
    state = serial.state_dict()
    assert network.entry("first.weight") == network.entry("second.weight")
    for name, own in own_state(net).items():
        assert torch.equal(network.part(name, state[name]), own)
        assert torch.equal(network.whole(name, own), state[name])
    other = {name: tensor + 1 for name, tensor in state.items()}
    convoy.load_state_dict(net, other)
    assert all(torch.equal(tensor, other[name]) for name, tensor in convoy.state_dict(net).items())


@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "channel=2"])
def test_whole_tensors_and_parts(plan: str) -> None:
    run_ranks(tensors, 2, plan)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "sum"}, "loss='sum' is unknown: it must be mean or part"),
        ({"batch_norm": "global"}, "batch_norm='global' is unknown: it must be sync, microbatch or local"),
        ({"plan": "sample=2"}, "needs 2 devices, but there is 1"),
        ({"example": torch.zeros(0, 1, 28, 28)}, "example must be a tensor"),
    ],
)
def test_what_cannot_be_is_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConvoyError) as caught:
        convoy.parallelize(
            models.create("lenet"), **{"plan": "serial", "example": torch.zeros(2, 1, 28, 28), **options}
        )
    assert words in str(caught.value)


def test_a_network_is_parallelized_once() -> None:
    net = convoy.parallelize(models.create("lenet"), "serial", torch.zeros(2, 1, 28, 28))
    with pytest.raises(ConvoyError, match="parallelized already"):
        convoy.parallelize(net, "serial", torch.zeros(2, 1, 28, 28))
    with pytest.raises(ConvoyError, match="is only in the state"):
        convoy.load_state_dict(net, {**net.state_dict(), "other": torch.zeros(1)})
    with pytest.raises(ConvoyError, match=r"is \[2\] in the state, but"):
        convoy.load_state_dict(net, dict.fromkeys(net.state_dict(), torch.zeros(2)))


def test_packages_and_functions_have_names_of_their_own() -> None:
    import convoy.engine.gradients.reducer as module

    assert inspect.ismodule(convoy.engine.gradients)
    assert inspect.isclass(module.GradientReducer)
    assert inspect.isfunction(convoy.gradients)
