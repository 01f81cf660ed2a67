"""Every registered network has the published parameters: their number, their names, their shapes."""

import hashlib

import pytest
import torch
from torch import nn

from convoy.errors import ConvoyError
from convoy.models import accepts, create, describe, list_models

# Parameters, and the digest of (name, shape) of every entry of the state dict: taken from torchvision 0.28.0 by
# `digest(torchvision.models.get_model(name, weights=None).state_dict())`; test_torchvision.py takes them again.
TORCHVISION = {
    "alexnet": (61_100_840, "9c198ebdae1863e4"),
    "squeezenet1_0": (1_248_424, "4654d26ad581241f"),
    "squeezenet1_1": (1_235_496, "1d365589393f9c1e"),
    "vgg11": (132_863_336, "cb3dc23f2a13e182"),
    "vgg11_bn": (132_868_840, "8b6717e727c0ecf9"),
    "vgg13": (133_047_848, "67c1dc8b57fde74b"),
    "vgg13_bn": (133_053_736, "f6b0597d18a7e4d2"),
    "vgg16": (138_357_544, "35c4623e0cd4a39d"),
    "vgg16_bn": (138_365_992, "347371586a8ea365"),
    "vgg19": (143_667_240, "4723255af8f6c485"),
    "vgg19_bn": (143_678_248, "fc3ff6fab2b5cc09"),
    "googlenet": (13_004_888, "7f541ca29410efb1"),
    "resnet18": (11_689_512, "84fb10d9c6905a1c"),
    "resnet34": (21_797_672, "28f9096d51307499"),
    "resnet50": (25_557_032, "d7e4f8bb0a536344"),
    "resnet101": (44_549_160, "02c0f34f4842751f"),
    "resnet152": (60_192_808, "685c66205bc823aa"),
    "densenet121": (7_978_856, "aa0fd9923b0003b8"),
    "densenet161": (28_681_000, "82d337d48f910d3a"),
    "densenet169": (14_149_480, "e2d0f02d9c0ce650"),
    "densenet201": (20_013_928, "0d234ad7e9a31b95"),
}

# Multiplied out by hand from the layers' sizes.
OTHERS = {
    "lenet": 61_706,
    "cifar-quick": 145_706,
    "alexnet-2012": 60_965_224,
}

# What the small stem and the small head change: (parameters of both for 224x224, the same for 32x32).
STEM_7, STEM_3 = 7 * 7 * 3 * 64, 3 * 3 * 3 * 64
VGG_HEADS = (25_088 * 4096 + 4096 * 4096 + 4096 * 1000 + 9192, 512 * 512 + 512 * 512 + 512 * 10 + 1034)
SMALL = {
    "alexnet": (
        11 * 11 * 3 * 64 + 9216 * 4096 + 4096 * 4096 + 4096 * 1000 + 9192,
        STEM_3 + 4096 * 1024 + 1024 * 1024 + 1024 * 10 + 2058,
    ),
    "squeezenet1_0": (7 * 7 * 3 * 96 + 513 * 1000, 3 * 3 * 3 * 96 + 513 * 10),
    "squeezenet1_1": (513 * 1000, 513 * 10),
    **{name: VGG_HEADS for name in TORCHVISION if name.startswith("vgg")},
    "googlenet": (STEM_7 + 3 * 1025 * 1000, STEM_3 + 3 * 1025 * 10),
    **{f"resnet{depth}": (STEM_7 + 513 * 1000, STEM_3 + 513 * 10) for depth in (18, 34)},
    **{f"resnet{depth}": (STEM_7 + 2049 * 1000, STEM_3 + 2049 * 10) for depth in (50, 101, 152)},
    **{
        f"densenet{depth}": (7 * 7 * 3 * stem + (1 + last) * 1000, 3 * 3 * 3 * stem + (1 + last) * 10)
        for depth, stem, last in ((121, 64, 1024), (161, 96, 2208), (169, 64, 1664), (201, 64, 1920))
    },
}


def digest(state: dict[str, torch.Tensor]) -> str:
    text = "\n".join(f"{name} {tuple(tensor.shape)}" for name, tensor in state.items())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def on_meta(name: str, **options: object) -> nn.Module:
    with torch.device("meta"):
        return create(name, **options)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_tables_cover_the_registry() -> None:
    small = {f"{name}-cifar" for name in TORCHVISION}
    assert {info.name for info in list_models()} == TORCHVISION.keys() | OTHERS.keys() | small


@pytest.mark.parametrize("name", TORCHVISION)
def test_names_and_shapes_are_torchvisions(name: str) -> None:
    model = on_meta(name)
    assert (num_parameters(model), digest(model.state_dict())) == TORCHVISION[name]


def test_digest_notices_a_name_and_a_shape() -> None:
    state = on_meta("resnet18").state_dict()
    renamed = {name.replace("fc.", "head."): tensor for name, tensor in state.items()}
    assert digest(renamed) != digest(state) != digest(on_meta("resnet18", num_classes=999).state_dict())


@pytest.mark.parametrize(("name", "expected"), OTHERS.items())
def test_parameters_of_the_others(name: str, expected: int) -> None:
    assert num_parameters(on_meta(name)) == expected


@pytest.mark.parametrize("name", SMALL)
def test_small_images_change_first_layer_and_head_only(name: str) -> None:
    large, small = SMALL[name]
    assert num_parameters(on_meta(f"{name}-cifar")) == TORCHVISION[name][0] - large + small


def test_resnet18_for_cifar_is_the_one_of_the_literature() -> None:
    # 11,173,962 parameters and 0.56 billion multiply-adds: kuangliu/pytorch-cifar and many papers that use it.
    assert num_parameters(on_meta("resnet18-cifar")) == 11_173_962


@pytest.mark.parametrize("info", list_models(), ids=lambda info: info.name)
def test_every_network_honours_classes_and_channels(info) -> None:
    model = on_meta(info.name, num_classes=7, in_channels=2)
    assert info.input_shape is not None
    images = torch.empty(2, 2, *info.input_shape[1:], device="meta")
    assert model.eval()(images).shape == (2, 7)
    assert info == describe(info.name)
    assert "\n" not in info.title and len(info.title) < 80


@pytest.mark.parametrize("info", list_models(), ids=lambda info: info.name)
def test_defaults_are_those_described(info) -> None:
    assert info.input_shape is not None
    images = torch.empty(2, *info.input_shape, device="meta")
    assert on_meta(info.name).eval()(images).shape == (2, info.num_classes)


@pytest.mark.parametrize("info", list_models(), ids=lambda info: info.name)
def test_every_network_can_be_captured_as_a_graph(info) -> None:
    graph = torch.fx.symbolic_trace(on_meta(info.name).train()).graph
    assert [node.op for node in graph.nodes][-1] == "output"


def test_accepts() -> None:
    assert accepts("resnet50", "zero_init_residual")
    assert accepts("lenet", "image_size")
    assert not accepts("vgg16", "zero_init_residual")
    assert not accepts("resnet50", "depth"), "what the name says is not an option"
    assert not accepts("resnet50", "num_classes")


WRONG = {
    "a digit is missing": (lambda: create("resnet5"), "'resnet5': did you mean resnet50"),
    "other case": (lambda: create("ResNet50"), "'ResNet50': did you mean resnet50"),
    "nothing is close": (lambda: create("zzz"), "'zzz': `convoy models` lists them"),
    "describe": (lambda: describe("vgg-16"), "did you mean vgg16"),
    "accepts": (lambda: accepts("lennet", "x"), "did you mean lenet"),
    "empty": (lambda: create(""), "unknown model ''"),
    "unknown option": (lambda: create("resnet18", dropuot=0.1), "no option 'dropuot': it accepts zero_init_residual"),
    "no options at all": (lambda: create("cifar-quick", dropout=0.1), "no option 'dropout': it has none"),
    "said by the name": (lambda: create("vgg16", depth=19), "no option 'depth'"),
    "option of another type": (lambda: create("googlenet", aux_logits="no"), "'aux_logits' of googlenet is 'no'"),
    "a bool is no number": (lambda: create("lenet", image_size=True), "'image_size' of lenet is True"),
    "refused value": (lambda: create("alexnet", dropout=2.0), "alexnet refuses dropout=2.0"),
    "image size": (lambda: create("lenet", image_size=64), "28x28 or 32x32 pixels, not 64x64"),
    "no classes": (lambda: create("lenet", num_classes=0), "num_classes of lenet is 0"),
    "half a class": (lambda: create("lenet", num_classes=2.5), "num_classes of lenet is 2.5"),
    "no channels": (lambda: create("lenet", in_channels=-1), "in_channels of lenet is -1"),
    "transform of grey images": (
        lambda: create("googlenet", in_channels=1, transform_input=True),
        "transform_input is for 3 channels",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_one_sentence(case: str) -> None:
    call, words = WRONG[case]
    with torch.device("meta"), pytest.raises(ConvoyError) as caught:
        call()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
