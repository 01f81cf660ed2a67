"""Registered networks: published parameters, names, shapes and counts; what their papers say; what is refused."""

import hashlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.models import count, create, describe, list_models
from convoy.models.alexnet import response_norm
from convoy.models.resnet import Blur, DropPath
from convoy.models.weights import classifier_names
from convoy.ops import capture

# Parameters, the digest of (name, shape) of every entry of the state dict, taken from torchvision 0.28.0 by
# `digest(torchvision.models.get_model(name, weights=None).state_dict())` (test_libraries.py takes them again), and the
# parameters for small images: the first layer and the head are those of 32x32 pixels and 10 classes, by hand.
TORCHVISION = {
    "alexnet": (61_100_840, "9c198ebdae1863e4", 7_703_370),
    "squeezenet1_0": (1_248_424, "4654d26ad581241f", 729_034),
    "squeezenet1_1": (1_235_496, "1d365589393f9c1e", 727_626),
    "vgg11": (132_863_336, "cb3dc23f2a13e182", 9_750_922),
    "vgg11_bn": (132_868_840, "8b6717e727c0ecf9", 9_756_426),
    "vgg13": (133_047_848, "67c1dc8b57fde74b", 9_935_434),
    "vgg13_bn": (133_053_736, "f6b0597d18a7e4d2", 9_941_322),
    "vgg16": (138_357_544, "35c4623e0cd4a39d", 15_245_130),
    "vgg16_bn": (138_365_992, "347371586a8ea365", 15_253_578),
    "vgg19": (143_667_240, "4723255af8f6c485", 20_554_826),
    "vgg19_bn": (143_678_248, "fc3ff6fab2b5cc09", 20_565_834),
    "googlenet": (13_004_888, "7f541ca29410efb1", 9_952_958),
    "resnet18": (11_689_512, "84fb10d9c6905a1c", 11_173_962),
    "resnet34": (21_797_672, "28f9096d51307499", 21_282_122),
    "resnet50": (25_557_032, "d7e4f8bb0a536344", 23_520_842),
    "resnet101": (44_549_160, "02c0f34f4842751f", 42_512_970),
    "resnet152": (60_192_808, "685c66205bc823aa", 58_156_618),
    "densenet121": (7_978_856, "aa0fd9923b0003b8", 6_956_426),
    "densenet161": (28_681_000, "82d337d48f910d3a", 26_482_570),
    "densenet169": (14_149_480, "e2d0f02d9c0ce650", 12_493_450),
    "densenet201": (20_013_928, "0d234ad7e9a31b95", 18_104_458),
}
BY_HAND = {"lenet": 61_706, "cifar-quick": 145_706, "airbench94": 1_972_792, "alexnet-2012": 60_965_224}
BY_HAND["unet"] = 7_763_074
"""Parameters, multiplied out from the layers' sizes."""
HEADS = {"lenet": ["classifier.4"], "cifar-quick": ["classifier.2"], "alexnet": ["classifier.6"], "resnet": ["fc"]}
HEADS |= {"vgg": ["classifier.6"], "squeezenet": ["classifier.1"], "googlenet": ["aux1.fc2", "aux2.fc2", "fc"]}
HEADS |= {"densenet": ["classifier"], "airbench94": ["classifier"], "unet": ["classifier"]}
BILLIONS = {"alexnet": 0.71, "googlenet": 1.50, "resnet18": 1.81, "resnet50": 4.09, "vgg16": 15.47, "densenet121": 2.83}
"""Of multiply-adds at 224x224, as torchvision's documentation gives them for its weights."""


def digest(state: dict[str, Tensor]) -> str:
    text = "\n".join(f"{name} {tuple(tensor.shape)}" for name, tensor in state.items())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def on_meta(name: str, **options: object) -> nn.Module:
    with torch.device("meta"):
        return create(name, **options)


ALWAYS = ("lenet", "googlenet", "resnet18-cifar", "alexnet-2012")
NAMES = [info.name for info in list_models()]
OTHERS = [name for name in NAMES if name not in ALWAYS]
# Smaller ones make the same calls.
DEEPER = [name for name in NAMES if any(k in name for k in ("13", "16", "19", "101", "152", "net201", "34", "-cifar"))]


@pytest.mark.parametrize("names", [ALWAYS, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_networks_have_their_parameters_classes_channels_and_heads(names: list[str]) -> None:
    assert set(NAMES) == TORCHVISION.keys() | BY_HAND.keys() | {f"{name}-cifar" for name in TORCHVISION}
    for name in names:
        info, large, model = describe(name), name.removesuffix("-cifar"), on_meta(name)
        parameters, shapes, small = TORCHVISION.get(large, (BY_HAND.get(name), None, None))
        assert sum(p.numel() for p in model.parameters()) == (parameters if name == large else small), name
        assert name != large or shapes in (None, digest(model.state_dict())), name
        pixels = info.input_shape[1:] if name == "unet" else ()
        assert model.eval()(torch.empty(2, *info.input_shape, device="meta")).shape == (2, info.num_classes, *pixels)
        other = on_meta(name, num_classes=7, in_channels=2)
        assert other.eval()(torch.empty(2, 2, *info.input_shape[1:], device="meta")).shape == (2, 7, *pixels)
        assert classifier_names(other) == HEADS[max((family for family in HEADS if name.startswith(family)), key=len)]
        assert all(other.get_submodule(head).weight.shape[0] == 7 for head in classifier_names(other))
        if name not in DEEPER:
            graph = capture(model.train(), [(2, *info.input_shape)])
            assert {value.name for value in graph.parameters()} == {name for name, _ in model.named_parameters()}
            assert "opaque" not in {call.op for call in graph.calls}, name
        if name in BILLIONS:
            assert count(name).flops / 2e9 == pytest.approx(BILLIONS[name], abs=0.006)


def test_alexnet_of_2012_is_the_papers() -> None:
    """Section 3.3 of Krizhevsky et al. (2012) as written there, with k = 2, n = 5, beta = 0.75; two columns."""

    def normalized(x: Tensor, alpha: float) -> Tensor:
        out = torch.empty_like(x)
        for i in range(x.shape[1]):
            window = x[:, max(0, i - 2) : min(x.shape[1] - 1, i + 2) + 1]
            out[:, i] = x[:, i] / (2 + alpha * window.square().sum(1)) ** 0.75
        return out

    x = 50 * torch.randn(2, 9, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(response_norm()(x), normalized(x, alpha=1e-4))
    assert not torch.allclose(response_norm()(x), normalized(x, alpha=1e-4 / 5))  # the control
    model = create("alexnet-2012", num_classes=10)
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert [layer.groups for layer in layers if isinstance(layer, nn.Conv2d)] == [1, 2, 1, 2, 2]
    assert [set(layer.bias.tolist()) for layer in layers] == [{0}, {1}, {0}, {1}, {1}, {1}, {1}, {0}]
    assert all(layer.weight.std().item() == pytest.approx(0.01, rel=0.05) for layer in layers)
    images, sizes = torch.empty(1, 3, 224, 224, device="meta"), [224]
    for layer in on_meta("alexnet-2012").features:
        images = layer(images)
        sizes.append(images.shape[-1])
    assert list(dict.fromkeys(sizes)) == [224, 55, 27, 13, 6], "the map sizes of the paper"


def test_a_blur_is_the_papers_filter_in_front_of_strides_and_depth_is_stochastic() -> None:
    """Zhang, 2019, section 3; where FFCV has it, not in front of the first convolution."""
    x, row = torch.randn(2, 3, 7, 6, dtype=torch.float64), torch.tensor([1, 2, 1], dtype=torch.float64) / 4
    weight = torch.outer(row, row).expand(3, 1, 3, 3)
    torch.testing.assert_close(Blur()(x), F.conv2d(x, weight, padding=1, groups=3), rtol=1e-12, atol=1e-12)
    blurred, plain = create("resnet50", blur_pool=True, drop_path=0.3), create("resnet50")
    assert blurred.state_dict().keys() == plain.state_dict().keys()
    places = [name for name, module in blurred.named_modules() if isinstance(module, Blur)]
    assert places == ["layer2.0.blur", "layer3.0.blur", "layer4.0.blur"]
    rates = [module.probability for module in blurred.modules() if isinstance(module, DropPath)]
    assert rates == pytest.approx([0.3 * number / 15 for number in range(1, 16)])
    kept = DropPath(0.25)(torch.ones(4000, 1, 1, 1, dtype=torch.float64))
    assert set(kept.unique().tolist()) == {0, 1 / 0.75} and kept.mean().item() == pytest.approx(1, abs=0.05)
