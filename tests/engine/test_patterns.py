"""A plan's patterns against the layers of a network, as a user of a YAML plan would write them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy import models
from convoy.errors import ConvoyError


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


MATCHING = ("stem", "blocks.*", "blocks.0.conv", "blocks.?.conv", "aux", "a*", "*.conv", "blocks.0.relu", "fc")
HINTS = {
    "block.*": "did you mean blocks.*?",
    "blocks": "did you mean blocks.*?",
    "blocks.0": "did you mean blocks.0.*?",
    "module.stem": "did you mean stem?",
    "fx": "did you mean fc?",
    "xyz": "its layers are stem, ",
}


@pytest.mark.parametrize(("net", "train"), [(Scaled, True), (Scaled, False), (Unseen, True)])
def test_patterns_match_layers_or_are_refused_with_a_hint(net: type[nn.Module], train: bool) -> None:
    for pattern in MATCHING:
        parallelize(pattern, net, train)
    for pattern, hint in HINTS.items():
        with pytest.raises(ConvoyError) as caught:
            parallelize(pattern, net, train)
        assert str(caught.value).startswith(f"the plan's pattern {pattern} matches no layer of this network: {hint}")


def test_a_layer_whose_weights_another_computes_with_and_what_is_said_first() -> None:
    for pattern, hint in [
        ("owner.conv", "those of layer owner: write owner"),
        ("inner", "by the network itself, which only * matches"),
    ]:
        with pytest.raises(ConvoyError, match=f"the plan's pattern {pattern} matches no layer") as caught:
            parallelize(pattern)
        assert hint in str(caught.value)
    parallelize("owner")
    plan = {"mesh": {"gpu": 1}, "layers": {"clasifier.*": {"gpu": "sample"}, "*": {"gpu": "filter"}}}
    with pytest.raises(ConvoyError, match=r"did you mean classifier\.\*\?"):
        convoy.parallelize(models.create("alexnet"), plan, torch.zeros(2, 3, 64, 64))
