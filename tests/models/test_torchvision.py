"""Beside torchvision, where it imports: the same names, the same start from a seed, the same outputs and gradients."""

from types import ModuleType

import pytest
import torch
from torch import nn

from convoy.models import create, list_models

NAMES = [info.name for info in list_models() if not info.name.endswith("-cifar")]
NAMES = [name for name in NAMES if name not in ("lenet", "cifar-quick", "alexnet-2012")]
RUN = [
    "alexnet",
    "squeezenet1_0",
    "squeezenet1_1",
    "vgg11",
    "vgg16_bn",
    "googlenet",
    "resnet18",
    "resnet50",
    "resnet152",
    "densenet121",
]


def reference(models: ModuleType, name: str, **options: object) -> nn.Module:
    if name == "googlenet":
        options["init_weights"] = True
    return models.get_model(name, weights=None, **options)


@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes(torchvision_models: ModuleType, name: str) -> None:
    with torch.device("meta"):
        ours, theirs = create(name).state_dict(), reference(torchvision_models, name).state_dict()
    assert [(key, value.shape) for key, value in ours.items()] == [(key, value.shape) for key, value in theirs.items()]


@pytest.mark.parametrize("name", RUN)
def test_start_and_outputs(torchvision_models: ModuleType, name: str) -> None:
    torch.manual_seed(5)
    ours = create(name)
    torch.manual_seed(5)
    theirs = reference(torchvision_models, name)
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), f"{key} starts otherwise"
    images = torch.randn(4, 3, 96, 96)
    with torch.no_grad():
        for module in theirs.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None  # statistics of these images: with the initial ones GoogLeNet's signal fades
        theirs.train()(images)
        ours.load_state_dict(theirs.state_dict())
        ours.eval()
        expected = theirs.eval()(images)
        torch.testing.assert_close(ours(images), expected, rtol=1e-5, atol=1e-5)
        next(ours.parameters()).mul_(1.01)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(ours(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["googlenet", "resnet18"])
def test_gradients_in_training(torchvision_models: ModuleType, name: str) -> None:
    dropout = {"dropout": 0.0, "dropout_aux": 0.0} if name == "googlenet" else {}
    ours = create(name, **dropout).double().train()
    theirs = reference(torchvision_models, name, **dropout).double().train()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(4, 3, 64, 64, dtype=torch.float64)
    for model in (ours, theirs):
        out = model(images)
        sum((i + 1) * one.square().mean() for i, one in enumerate(out if isinstance(out, tuple) else (out,))).backward()
    expected = dict(theirs.named_parameters())
    for key, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key].grad, rtol=1e-8, atol=1e-12)
    for key, buffer in ours.named_buffers():
        torch.testing.assert_close(buffer, theirs.get_buffer(key), rtol=1e-10, atol=1e-12)
