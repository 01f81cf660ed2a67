"""What is exact is not decided by numbers in low precision: TF32 rounds to 11 bits, and otherwise for other batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy import models
from convoy.training.build import merged, probed
from convoy.training.recipe import load_recipe

CPU = torch.device("cpu")
NETWORKS = {
    "alexnet-cifar": 32,
    "cifar-quick": 32,
    "densenet121": 32,
    "googlenet": 64,
    "lenet": 28,
    "resnet18": 32,
    "resnet34": 32,
    "resnet50": 32,
    "squeezenet1_1": 32,
    "vgg11_bn": 32,
}


@pytest.fixture
def tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions and linear layers as a GPU computes them, by algorithms that hang on the number of samples."""

    def rounded(x: Tensor, samples: int) -> Tensor:
        if x.dtype != torch.float32:
            return x
        half = 0x1000 if samples % 4 else 0
        bits = (x.detach().contiguous().view(torch.int32) + half) & ~0x1FFF
        return x + (bits.view(torch.float32) - x.detach())

    def patched(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, w, *rest, **named: function(rounded(x, len(x)), rounded(w, len(x)), *rest, **named)

    for name in ("conv2d", "linear"):
        monkeypatch.setattr(F, name, patched(getattr(F, name)))


def pass_of(model: nn.Module, channels: int, size: int) -> tuple[int, str]:
    recipe = load_recipe("default", ["model.name=any", "data.path=none", "batch=12", "microbatch=3"])
    sizes = (3, 3, 3, 3)
    found = probed(model, recipe, (channels, size, size), sizes, CPU, "nothing")
    return merged(recipe, found, sizes, CPU, sharing=2**30)  # memory aside


@pytest.mark.parametrize("name", NETWORKS)
def test_no_network_of_the_registry_is_taken_for_coupled(tf32: None, name: str) -> None:
    torch.manual_seed(0)
    channels = 1 if name == "lenet" else 3
    merge, why = pass_of(models.create(name, num_classes=10, in_channels=channels), channels, NETWORKS[name])
    assert merge == 4, why


@torch.library.custom_op("convoy_tests::centered", mutates_args=())
def centered(x: Tensor) -> Tensor:
    return x - x.mean(0)


@torch.library.custom_op("convoy_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


for operation in (centered, doubled):
    operation.register_fake(lambda x: torch.empty_like(x))
    operation.register_autograd(lambda ctx, gradient: gradient)


class Coupled(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))

    def forward(self, x: Tensor) -> Any:
        logits = self.layers(x)
        if self.kind == "mean":
            return logits - logits.mean(0)
        if self.kind == "softmax":
            return logits.softmax(0)
        if self.kind == "uncaptured":
            return logits - logits.mean(0) if float(logits.detach().sum()) < 1e9 else logits
        if self.kind == "batch norm by hand":
            return F.batch_norm(logits, None, None, training=True)
        if self.kind == "uncaptured and apart":
            return logits if float(logits.detach().sum()) < 1e9 else logits * 2
        return (centered if self.kind == "no rule" else doubled)(logits)


@pytest.mark.parametrize("kind", ["mean", "softmax", "uncaptured", "batch norm by hand", "no rule"])
def test_networks_that_couple_samples_are_found(tf32: None, kind: str) -> None:
    torch.manual_seed(0)
    assert pass_of(Coupled(kind), 3, 8) == (1, "one by one: the network couples the samples of a batch")


@pytest.mark.parametrize("kind", ["no rule and apart", "uncaptured and apart"])
def test_what_no_rule_covers_is_tried_in_float64(tf32: None, kind: str) -> None:
    torch.manual_seed(0)
    assert pass_of(Coupled(kind), 3, 8)[0] == 4
