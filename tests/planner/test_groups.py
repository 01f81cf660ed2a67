"""Layers are grouped so that there are few, in the order of the network, and none is lost."""

import pytest
import torch

from convoy.models import create
from convoy.planner import workload_of
from convoy.planner.comparison import MOST, layer_groups
from convoy.plans.plan import Plan


def groups(name: str, size: int, channels: int = 3, most: int = MOST) -> dict[str, str]:
    workload = workload_of(create(name), torch.empty(1, channels, size, size), 2)
    return layer_groups(workload.place(Plan.parse("serial")), most)


def test_layers_without_weights_belong_to_those_before() -> None:
    found = groups("lenet", 28, 1)
    assert list(dict.fromkeys(found.values())) == [
        "features.0",
        "features.3",
        "classifier.0",
        "classifier.2",
        "classifier.4",
    ]
    assert found["features.1"] == "features.0"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "some"), [("alexnet", "classifier.6"), ("resnet18", "layer1.0"), ("resnet50", "fc")])
def test_large_networks_are_shown_by_blocks(name: str, some: str) -> None:
    found = groups(name, 64)
    assert some in found.values()
    assert 5 < len(set(found.values())) <= MOST


def test_fewer_groups_are_larger_modules() -> None:
    assert set(groups("resnet18", 64, most=8).values()) == {
        "conv1",
        "bn1",
        "layer1",
        "layer2",
        "layer3",
        "layer4",
        "fc",
    }
