"""Which layers are the classifier."""

import pytest
import torch
from torch import nn

from convoy.models import classifier_names, create, image_channels, list_models

HEADS = {
    "lenet": ["classifier.4"],
    "cifar-quick": ["classifier.2"],
    "alexnet-2012": ["classifier.6"],
    "alexnet": ["classifier.6"],
    "vgg": ["classifier.6"],
    "googlenet": ["aux1.fc2", "aux2.fc2", "fc"],
    "resnet": ["fc"],
    "squeezenet": ["classifier.1"],
    "densenet": ["classifier"],
}


@pytest.mark.parametrize("info", list_models(), ids=lambda info: info.name)
def test_registered_networks(info) -> None:
    family = max((name for name in HEADS if info.name.startswith(name)), key=len)
    with torch.device("meta"):
        model = create(info.name, num_classes=7)
    assert classifier_names(model) == HEADS[family]
    for name in HEADS[family]:
        assert model.get_submodule(name).weight.shape[0] == 7


def test_timm_says_it_itself() -> None:
    model = nn.Sequential()
    model.add_module("head", nn.Linear(2, 3))
    model.add_module("last", nn.Linear(3, 4))
    assert classifier_names(model) == ["last"]
    model.pretrained_cfg = {"classifier": "head"}
    assert classifier_names(model) == ["head"]
    model.pretrained_cfg = {"classifier": ("head", "last", "not there")}
    assert classifier_names(model) == ["head", "last"]


def test_a_network_without_classifier() -> None:
    assert classifier_names(nn.ReLU()) == []


def test_channels_of_the_images() -> None:
    assert image_channels(nn.Sequential(nn.ReLU(), nn.Conv2d(2, 5, 3), nn.Conv2d(5, 1, 3))) == 2
    assert image_channels(nn.Linear(2, 3)) == 3
