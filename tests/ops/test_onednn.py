"""Convolutions of small passes: by which kernel torch computes them, and that nothing else changes."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import profile

import convoy
from convoy import processor
from convoy.engine.layers import PointwiseConv2d, prepare
from convoy.ops import convolution, onednn
from convoy.ops.convolution import weighted
from convoy.ops.onednn import is_better_dilated, packed, pointwise
from convoy.ops.postponed import Weighted
from convoy.processor import has_amx


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


def test_only_small_passes_in_float32_are_called_dilated(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = layer().weight, images()
    assert is_better_dilated(x, weight)
    for name, given, number in (
        ("oneDNN anyway", images(16), 256),
        ("float64", x.double(), 256),
        ("bfloat16", x.bfloat16(), 256),
        ("one pixel", images(8, pixels=1), 2048),
        ("little work", images(2), 8),
        ("a single small image", images(1), 1024),
    ):
        assert not is_better_dilated(given, torch.empty(number, 1024, 1, 1)), name
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        assert not is_better_dilated(x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_better_dilated(x, weight)
    for pixels in (4, 5):  # a single image, where that leads to oneDNN
        dilated = kernels(nn.Sequential(layer(1024, dilation=2)), images(1, pixels))
        is_onednn = "aten::mkldnn_convolution" in dilated
        assert is_better_dilated(images(1, pixels), layer(1024).weight) == is_onednn == (pixels == 5)
    torch.set_num_threads(2)
    assert not is_better_dilated(x, weight)


def test_other_layers_are_left_alone_and_hooks_stay() -> None:
    options = (layer(stride=2), layer(dilation=2), nn.Conv2d(4, 4, 3), Own(4, 4, 1))
    others = [*options, nn.Conv2d(4, 4, 1, padding_mode="circular")]
    model = nn.Sequential(*others)
    prepare(model, 0, "microbatch")
    assert [type(each) for each in model] == [type(each) for each in others]
    assert not any(isinstance(each, PointwiseConv2d) for each in model)
    model, seen = nn.Sequential(layer()), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    prepare(model, 0, "microbatch")
    model(images())
    assert seen


def convolution_of(kernel: int = 3, stride: int = 1, padding: int = 1, dilation: int = 1) -> Weighted:
    pairs = {"stride": (stride, stride), "padding": (padding, padding), "dilation": (dilation, dilation)}
    return packed(weighted(F.conv2d, {**pairs, "groups": 1}), **pairs)


def small(channels: int, pixels: int, dtype: torch.dtype = torch.float32, samples: int = 16) -> Tensor:
    x = torch.randn(samples, channels, pixels, pixels + 1, generator=torch.Generator().manual_seed(1))
    return x.to(dtype).to(memory_format=torch.channels_last)


def filters(number: int, channels: int, kernel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    weight = torch.randn(number, channels, kernel, kernel, generator=torch.Generator().manual_seed(2))
    return weight.to(dtype).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_laid_out_once_gives_the_same_bits(dtype: torch.dtype) -> None:
    sizes = ((3, 1, 1, 1), (1, 1, 0, 1), (1, 2, 0, 1), (3, 2, 1, 1), (3, 3, 0, 1), (2, 2, 1, 2))
    for number, size in enumerate(sizes):
        layer, x, weight = convolution_of(*size), small(64, 5, dtype), filters(96, 64, size[0], dtype)
        assert layer.prepare is not None
        if dtype == torch.bfloat16 and has_amx():
            assert layer.prepare(x, weight) is None
            continue
        bias = torch.arange(96.0).to(dtype) if number % 2 else None
        ready = layer.prepare(x, weight)
        assert ready is not None, "this torch packs no weights: this test shows nothing"
        for images in (x, x.flip(0).contiguous(memory_format=torch.channels_last)):  # the weight is there already
            y, expected = ready.compute(images, weight, bias), layer.compute(images, weight, bias)
            assert torch.equal(y, expected) and y.stride() == expected.stride()
            back, expected = (each.input_gradient(torch.sin(y), images, weight) for each in (ready, layer))
            assert torch.equal(back, expected) and back.stride() == expected.stride()
        assert not torch.equal(ready.compute(x, weight + 1, bias), layer.compute(x, weight + 1, bias)), "it is kept"


def test_nothing_is_laid_out_that_torch_leaves_to_another_kernel() -> None:
    """1 × 1 convolutions of few samples with one thread, and single small images; and what is laid out otherwise."""
    layer = convolution_of()
    assert layer.prepare is not None
    assert layer.prepare(small(64, 5), filters(96, 64, 3)) is not None
    for name, x, weight in (
        ("contiguous images", small(64, 5).contiguous(), filters(96, 64, 3)),
        ("contiguous weight", small(64, 5), filters(96, 64, 3).contiguous()),
        ("float64", small(64, 5, torch.float64), filters(96, 64, 3, torch.float64)),
        ("many pixels", small(64, 12), filters(96, 64, 3)),
        ("no samples", small(64, 5, samples=0), filters(96, 64, 3)),
    ):
        assert layer.prepare(x, weight) is None, name

    def ready(kernel: int, samples: int, **options: int) -> bool:
        layer = convolution_of(kernel, padding=kernel // 2, **options)
        x, weight = small(64, 5, samples=samples), filters(96, 64, kernel)
        assert layer.prepare is not None
        found = layer.prepare(x, weight)
        assert found is None or torch.equal(found.compute(x, weight, None), layer.compute(x, weight, None))
        return found is not None

    assert ready(1, 16) and ready(3, 8) and ready(1, 8, stride=2)
    assert not ready(1, 8) and not ready(3, 1)
    torch.set_num_threads(2)
    assert ready(1, 8)


def test_what_is_called_dilated_is_laid_out_too() -> None:
    x, weight = small(256, 5, samples=8), filters(512, 256, 1)
    options = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    dilated = pointwise(
        weighted(F.conv2d, {**options, "groups": 1}), weighted(F.conv2d, {**options, "groups": 1, "dilation": (2, 2)})
    )
    prepare = packed(dilated, **options, may_dilate=True).prepare
    assert prepare is not None
    found = prepare(x, weight)
    assert found is not None and torch.equal(found.compute(x, weight, None), dilated.compute(x, weight, None))
    assert packed(dilated, **options).prepare(x, weight) is None  # type: ignore[misc]


def test_in_bfloat16_no_weight_is_laid_out_with_amx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the gradient of the input has other bits for some sizes."""
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(processor, "CPU_INFO", info)
    monkeypatch.setattr(onednn, "has_packing", onednn.has_packing.__wrapped__)
    layer = convolution_of()
    assert layer.prepare is not None
    for flags, in_bfloat16 in (("avx512_bf16", True), ("avx512_bf16 amx_bf16 amx_tile", False)):
        info.write_text(f"flags : {flags}")
        for dtype in (torch.float32, torch.bfloat16):
            ready = layer.prepare(small(64, 5, dtype), filters(96, 64, 3, dtype))
            assert (ready is not None) == (in_bfloat16 or dtype == torch.float32)
