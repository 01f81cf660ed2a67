"""Convolutions with 1 × 1 filters: by which kernel torch computes them, and that nothing else changes."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import profile

import convoy
from convoy.engine.layers import PointwiseConv2d, prepare
from convoy.ops import convolution
from convoy.ops.convolution import is_better_dilated


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def layer(filters: int = 256, **options: int) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(1024, filters, 1, **options)


def images(samples: int = 8, pixels: int = 4) -> Tensor:
    return torch.randn(samples, 1024, pixels, pixels, generator=torch.Generator().manual_seed(1))


def kernels(run: nn.Module, x: Tensor) -> set[str]:
    """The functions of torch by which a forward and a backward pass compute convolutions."""
    with profile() as found:
        run(x).sum().backward()
    return {event.key for event in found.key_averages() if "conv" in event.key}


def prepared(plain: nn.Module) -> nn.Module:
    model = nn.Sequential(copy.deepcopy(plain))
    prepare(model, 0, "microbatch")
    return model


def test_small_passes_are_left_to_onednn() -> None:
    slow = kernels(nn.Sequential(layer()), images())
    assert any("slow_conv2d" in name for name in slow), "torch chooses otherwise now: is_better_dilated can go"
    fast = kernels(prepared(layer()), images())
    assert "aten::mkldnn_convolution" in fast and not any("slow_conv2d" in name for name in fast)


def test_numbers_differ_by_rounding_alone() -> None:
    plain, model = layer(), prepared(layer())
    assert isinstance(model[0], PointwiseConv2d)
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    x = images()
    for net in (plain, model):
        net(x).square().sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-4 * float(one.grad.abs().max()))
    wide = torch.ones(4, 1024, 3, 3)
    assert not torch.allclose(F.conv2d(x, wide, padding=2, dilation=2), F.conv2d(x, wide, padding=1)), "of larger ones"


class Own(nn.Conv2d):
    """Computes its weights, and so cannot be replaced."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, 2 * self.weight, self.bias)


@pytest.mark.parametrize("kind", [nn.Conv2d, Own])
def test_several_devices_use_the_same_kernel(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Conv2d]) -> None:
    x = images()

    def own() -> nn.Module:
        torch.manual_seed(0)
        return kind(1024, 256, 1)

    def engine() -> Tensor:
        net = convoy.parallelize(nn.Sequential(own()), "serial", example=x, batch_norm="microbatch")
        return net(x)

    assert torch.equal(engine(), prepared(own())(x))
    monkeypatch.setattr(convolution, "is_torchs", lambda _: kind is Own)
    assert not torch.equal(engine(), prepared(own())(x)), "the kernels round alike: the test shows nothing"


@pytest.mark.parametrize(
    ("x", "filters"),
    [
        (images(16), 256),
        (images(8).double(), 256),
        (images(8).bfloat16(), 256),
        (images(8, pixels=1), 2048),
        (images(2), 8),
        (images(1), 1024),
    ],
    ids=["oneDNN anyway", "float64", "bfloat16", "one pixel", "little work", "a single small image"],
)
def test_other_passes_are_called_as_they_are(x: Tensor, filters: int) -> None:
    assert is_better_dilated(images(), torch.empty(256, 1024, 1, 1))
    assert not is_better_dilated(x, torch.empty(filters, 1024, 1, 1))


def test_a_single_image_is_called_dilated_where_that_leads_to_onednn() -> None:
    for pixels in (4, 5):
        x, conv = images(1, pixels), layer(1024)
        dilated = kernels(nn.Sequential(layer(1024, dilation=2)), x)
        assert is_better_dilated(x, conv.weight) == ("aten::mkldnn_convolution" in dilated) == (pixels == 5)


def test_nothing_is_called_dilated_where_it_would_not_be_onednn_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = layer().weight
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        assert not is_better_dilated(images(), weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_better_dilated(images(), weight)
    assert is_better_dilated(images(), weight)


def test_several_threads_use_onednn_anyway() -> None:
    torch.set_num_threads(2)
    assert not is_better_dilated(images(), torch.empty(256, 1024, 1, 1))


def test_other_layers_are_left_alone() -> None:
    others = [
        layer(stride=2),
        layer(dilation=2),
        nn.Conv2d(4, 4, 3),
        Own(4, 4, 1),
        nn.Conv2d(4, 4, 1, padding_mode="circular"),
    ]
    model = nn.Sequential(*others)
    prepare(model, 0, "microbatch")
    assert [type(each) for each in model] == [type(each) for each in others]
    assert not any(isinstance(each, PointwiseConv2d) for each in model)


def test_hooks_stay() -> None:
    model, seen = nn.Sequential(layer()), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    prepare(model, 0, "microbatch")
    model(images())
    assert seen
