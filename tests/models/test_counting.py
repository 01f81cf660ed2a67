"""Counts against numbers multiplied out by hand and published ones."""

import pytest
import torch
from torch import nn

from convoy.errors import ConvoyError
from convoy.models import Counts, accepts, count, create


def test_lenet_by_hand() -> None:
    convolutions = 28 * 28 * 6 * 25 + 10 * 10 * 16 * 6 * 25
    connected = 400 * 120 + 120 * 84 + 84 * 10
    assert count("lenet") == Counts(parameters=61_706, flops=2 * (convolutions + connected))


# Billions of multiply-adds at 224x224, as torchvision's documentation gives them for its weights.
PUBLISHED = {"alexnet": 0.71, "googlenet": 1.50, "resnet18": 1.81, "resnet50": 4.09, "resnet152": 11.51, "vgg16": 15.47}
PUBLISHED |= {"densenet121": 2.83, "densenet201": 4.29}


@pytest.mark.parametrize(("name", "multiply_adds"), PUBLISHED.items())
def test_published_operations(name: str, multiply_adds: float) -> None:
    assert count(name).flops / 2e9 == pytest.approx(multiply_adds, abs=0.006)


def test_a_network_counts_like_its_name_and_stays_as_it_was() -> None:
    model = create("resnet18-cifar")
    model.layer1.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    training = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    assert count(model, (3, 32, 32)) == count("resnet18-cifar")
    assert [module.training for module in model.modules()] == training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_image_size_and_channels_count() -> None:
    assert count("squeezenet1_1", (3, 448, 448)).flops > 3.9 * count("squeezenet1_1", (3, 224, 224)).flops
    assert count("resnet18", (1, 224, 224)).parameters == count("resnet18").parameters - 2 * 7 * 7 * 64


class AsksForValues(nn.Module):
    """Cannot run without values: the count has to run it for real."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scale = self.linear.bias.sum().item()
        return self.linear(images.flatten(1)) * scale


def test_what_the_meta_device_cannot_run_is_run_for_real() -> None:
    assert count(AsksForValues(), (1, 2, 2)) == Counts(parameters=25, flops=2 * 4 * 5)


def test_a_shared_layer_counts_its_parameters_once() -> None:
    layer = nn.Linear(4, 4)
    assert count(nn.Sequential(nn.Flatten(), layer, layer), (1, 2, 2)) == Counts(parameters=20, flops=2 * 2 * 16)


MISTAKES = {
    "images too small": (
        lambda: count("alexnet", (3, 32, 32)),
        "224x224 is its own size, and alexnet-cifar is for 32x32",
    ),
    "images too large": (lambda: count("cifar-quick", (3, 64, 64)), "cifar-quick cannot take images of 64x64 pixels"),
    "a network": (
        lambda: count(create("lenet"), (3, 28, 28)),
        "LeNet cannot take images of 28x28 pixels with 3 channels",
    ),
    "unknown": (lambda: count("resnet5"), "did you mean"),
    "no size known": (lambda: count(create("lenet")), "LeNet does not say what images it takes"),
    "own factory": (lambda: count("torch.nn:Identity"), "torch.nn:Identity does not say what images it takes"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_sentence(case: str) -> None:
    call, words = MISTAKES[case]
    with pytest.raises(ConvoyError) as caught:
        call()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_accepts_and_count_do_not_disturb_the_random_numbers() -> None:
    state = torch.get_rng_state()
    accepts("resnet50", "zero_init_residual")
    count("googlenet-cifar")
    assert torch.equal(torch.get_rng_state(), state)
