"""Which call of a network computes with several samples at once."""

from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from convoy import models
from convoy.engine.coupling import coupling
from convoy.ops import capture
from small_nets import SMALL_NETS


class With(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.between = Between(function)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.between(self.conv(x).mean((2, 3))))


class Between(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x - x.mean(0), "mean"),
        (lambda x: x * x.softmax(0), "softmax"),
        (lambda x: x - x.amax(0), "amax"),
        (lambda x: x + x.flip(0), "flip"),
        (lambda x: x + x.cumsum(0), "cumsum"),
        (lambda x: x + (x @ x.t()) @ x, "matmul"),
        (lambda x: x / x.norm(), "norm"),
        (lambda x: F.layer_norm(x, x.shape), "layer_norm"),
        (lambda x: F.group_norm(x.t()[None], 4)[0].t(), "group_norm"),
        (lambda x: F.rms_norm(x, x.shape), "rms_norm"),
    ],
)
def test_couplings(function: Callable[[Tensor], Tensor], name: str) -> None:
    call = coupling(capture(With(function), [(4, 3, 8, 8)]))
    assert call is not None
    assert call.layer == "between"
    assert getattr(call.function, "__name__", "") == name


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: x.softmax(1),
        lambda x: x + x.flip(1),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.layer_norm(x, (4,)),
        lambda x: F.rms_norm(x, (4,)),
        lambda x: F.normalize(x),
        lambda x: x.t().contiguous().t(),
    ],
)
def test_what_is_of_each_sample(function: Callable[[Tensor], Tensor]) -> None:
    assert coupling(capture(With(function), [(4, 3, 8, 8)])) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SMALL_NETS, "googlenet", "alexnet-2012", "resnet18"])
def test_networks_couple_nothing(name: str) -> None:
    small = name in SMALL_NETS
    model = SMALL_NETS[name]() if small else models.create(name)
    size = 32 if small else 96
    assert coupling(capture(model, [(4, 3, size, size)], training=True)) is None
