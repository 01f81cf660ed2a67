"""A plan's patterns against the layers of a network, as a user of a YAML plan would write them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy import models
from convoy.errors import ConvoyError
from ranks import run_ranks


class Block(nn.Module):
    """A residual block; what it calls by itself is an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.relu(self.conv(x))


class Scaled(nn.Module):
    """Computes with the weights of a layer that it never calls, and has a head for training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.inner = nn.Conv2d(4, 4, 3)
        self.blocks = nn.Sequential(Block(), Block())
        self.owner = Owner()
        self.aux = nn.Linear(4, 5)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = F.conv2d(self.stem(x), self.inner.weight * 2)
        x = self.owner(self.blocks(x)).mean((2, 3))
        return (self.fc(x), self.aux(x)) if self.training else self.fc(x)


class Owner(nn.Module):
    """Calls a function with its layer's weights, not the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.conv.weight, self.conv.bias)


class Unseen(Scaled):
    """The same, where nobody can capture it."""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if float(x.detach().sum()) > 1e9:
            x = x * 2
        x = self.blocks(self.inner(self.stem(x))).mean((2, 3))
        return (self.fc(x), self.aux(x)) if self.training else self.fc(x)


def parallelize(pattern: str, net: type[nn.Module] = Scaled, train: bool = True) -> nn.Module:
    plan = {"mesh": {"gpu": 1}, "layers": {pattern: {"gpu": "filter"}, "*": {"gpu": "sample"}}}
    return convoy.parallelize(net().train(train), plan, torch.zeros(2, 3, 12, 12))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("net", [Scaled, Unseen])
@pytest.mark.parametrize(
    "pattern", ["stem", "blocks.*", "blocks.0.conv", "blocks.?.conv", "aux", "a*", "*.conv", "blocks.0.relu", "fc"]
)
def test_patterns_that_match(pattern: str, net: type[nn.Module], train: bool) -> None:
    parallelize(pattern, net, train)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("block.*", "did you mean blocks.*?"),
        ("blocks", "did you mean blocks.*?"),
        ("blocks.0", "did you mean blocks.0.*?"),
        ("module.stem", "did you mean stem?"),
        ("fx", "did you mean fc?"),
        ("xyz", "its layers are stem, "),
    ],
)
def test_patterns_that_match_nothing(pattern: str, hint: str, train: bool) -> None:
    for net in (Scaled, Unseen):
        with pytest.raises(ConvoyError) as caught:
            parallelize(pattern, net, train)
        assert str(caught.value).startswith(f"the plan's pattern {pattern} matches no layer of this network: {hint}")


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("owner.conv", "those of layer owner: write owner"), ("inner", "by the network itself, which only * matches")],
)
def test_a_layer_whose_weights_another_computes_with(pattern: str, hint: str) -> None:
    with pytest.raises(ConvoyError) as caught:
        parallelize(pattern)
    assert f"the plan's pattern {pattern} matches no layer" in str(caught.value)
    assert hint in str(caught.value)
    parallelize("owner")


def test_a_wrong_pattern_is_said_before_what_follows_from_it() -> None:
    plan = {"mesh": {"gpu": 1}, "layers": {"clasifier.*": {"gpu": "sample"}, "*": {"gpu": "filter"}}}
    with pytest.raises(ConvoyError, match=r"did you mean classifier\.\*\?"):
        convoy.parallelize(models.create("alexnet"), plan, torch.zeros(2, 3, 64, 64))


def heads(plan: str) -> dict[str, float]:
    """Distance from the plain network of a training step of one that was parallelized for evaluation."""
    torch.manual_seed(0)
    serial = Scaled().double().eval()
    net = convoy.parallelize(copy.deepcopy(serial), plan, torch.zeros(2, 3, 12, 12, dtype=torch.float64))
    x = torch.randn(5, 3, 12, 12, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 3, 4])
    mine = convoy.local_samples(net, 5)
    for model, inputs, targets in ((serial, x, labels), (net, x[mine], labels[mine])):
        first, second = model.train()(inputs)
        (F.cross_entropy(first, targets) + 0.3 * F.cross_entropy(second, targets)).backward()
    got = convoy.gradients(net)
    layouts = net._convoy.layouts
    assert layouts["aux.weight"] == layouts["fc.weight"]
    assert got.keys() == {name for name, p in serial.named_parameters() if p.grad is not None}
    return {name: (got[name] - serial.get_parameter(name).grad).abs().max().item() for name in got}


@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "owt=2"])
def test_heads_of_training_are_divided_also_if_evaluation_came_first(plan: str) -> None:
    for found in run_ranks(heads, 2, plan):
        assert max(found.values()) < 1e-12, found
