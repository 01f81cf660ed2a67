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
from convoy import resources
from convoy.engine.uncaptured import PointwiseConv2d, prepare
from convoy.ops import convolution, onednn
from convoy.ops.convolution import weighted
from convoy.ops.onednn import is_better_dilated, packed, pointwise
from convoy.ops.postponed import Weighted
from convoy.resources import has_amx


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Own(nn.Conv2d):
    """Computes its weights, and so cannot be replaced."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, 2 * self.weight, self.bias)


def layer(filters: int = 256, kind: type[nn.Conv2d] = nn.Conv2d, **options: int) -> nn.Conv2d:
    torch.manual_seed(0)
    return kind(1024, filters, 1, **options)


def images(samples: int = 8, pixels: int = 4) -> Tensor:
    return torch.randn(samples, 1024, pixels, pixels, generator=torch.Generator().manual_seed(1))


def kernels(run: nn.Module, x: Tensor) -> set[str]:
    """The functions of torch by which a forward and a backward pass compute convolutions."""
    with profile() as found:
        run(x).sum().backward()
    return {event.key for event in found.key_averages() if "conv" in event.key}


def prepared(plain: nn.Module) -> nn.Sequential:
    model = nn.Sequential(copy.deepcopy(plain))
    prepare(model, 0, "microbatch")
    return model


def test_small_passes_are_left_to_onednn_and_numbers_differ_by_rounding_alone() -> None:
    plain, model, x = layer(), prepared(layer()), images()
    assert isinstance(model[0], PointwiseConv2d) and list(model.state_dict()) == ["0.weight", "0.bias"]
    slow, fast = kernels(nn.Sequential(layer()), x), kernels(model, x)
    assert any("slow_conv2d" in name for name in slow), "torch chooses otherwise now: is_better_dilated can go"
    assert "aten::mkldnn_convolution" in fast and not any("slow_conv2d" in name for name in fast)
    model.zero_grad()
    for net in (plain, model):
        net(x).square().sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-4 * float(one.grad.abs().max()))


def test_several_devices_use_the_same_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (nn.Conv2d, Own):

        def by_engine(kind: type[nn.Conv2d] = kind) -> Tensor:
            model = nn.Sequential(layer(kind=kind))
            return convoy.parallelize(model, "serial", example=images(), batch_norm="microbatch")(images())

        want = prepared(layer(kind=kind))(images())
        assert torch.equal(by_engine(), want)
        with monkeypatch.context() as patch:
            patch.setattr(convolution, "is_torchs", lambda _, kind=kind: kind is Own)
            assert not torch.equal(by_engine(), want), "the kernels round alike: the test shows nothing"


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
    model, seen = nn.Sequential(*options, nn.Conv2d(4, 4, 1, padding_mode="circular"), layer()), list[int]()
    model[-1].register_forward_hook(lambda *_: seen.append(1))
    prepare(model, 0, "microbatch")
    assert [isinstance(each, PointwiseConv2d) for each in model] == [False] * 5 + [True]
    model[-1](images())
    assert seen


def of(kernel: int = 3, stride: int = 1, padding: int = 1, dilation: int = 1) -> Weighted:
    pairs = {"stride": (stride, stride), "padding": (padding, padding), "dilation": (dilation, dilation)}
    return packed(weighted(F.conv2d, {**pairs, "groups": 1}), **pairs)


def small(channels: int, pixels: int, dtype: torch.dtype = torch.float32, samples: int = 16) -> Tensor:
    x = torch.randn(samples, channels, pixels, pixels + 1, generator=torch.Generator().manual_seed(1))
    return x.to(dtype).to(memory_format=torch.channels_last)


def filters(number: int, channels: int, kernel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    weight = torch.randn(number, channels, kernel, kernel, generator=torch.Generator().manual_seed(2))
    return weight.to(dtype).to(memory_format=torch.channels_last)


def ready(layer: Weighted, x: Tensor, weight: Tensor) -> Weighted | None:
    assert layer.prepare is not None
    return layer.prepare(x, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_laid_out_once_gives_the_same_bits(dtype: torch.dtype) -> None:
    sizes = ((3, 1, 1, 1), (1, 1, 0, 1), (1, 2, 0, 1), (3, 2, 1, 1), (3, 3, 0, 1), (2, 2, 1, 2))
    for number, size in enumerate(sizes):
        layer, x, weight = of(*size), small(64, 5, dtype), filters(96, 64, size[0], dtype)
        laid_out = ready(layer, x, weight)
        if dtype == torch.bfloat16 and has_amx():
            assert laid_out is None
            continue
        bias = torch.arange(96.0).to(dtype) if number % 2 else None
        assert laid_out is not None, "this torch packs no weights: this test shows nothing"
        for images in (x, x.flip(0).contiguous(memory_format=torch.channels_last)):  # the weight is there already
            y, expected = laid_out.compute(images, weight, bias), layer.compute(images, weight, bias)
            assert torch.equal(y, expected) and y.stride() == expected.stride()
            back, expected = (each.input_gradient(torch.sin(y), images, weight) for each in (laid_out, layer))
            assert torch.equal(back, expected) and back.stride() == expected.stride()
        assert not torch.equal(laid_out.compute(x, weight + 1, bias), layer.compute(x, weight + 1, bias)), "it is kept"


def test_nothing_is_laid_out_that_torch_leaves_to_another_kernel() -> None:
    """1 × 1 convolutions of few samples with one thread, and single small images; and what is laid out otherwise."""
    assert ready(of(), small(64, 5), filters(96, 64, 3)) is not None
    for name, x, weight in (
        ("contiguous images", small(64, 5).contiguous(), filters(96, 64, 3)),
        ("contiguous weight", small(64, 5), filters(96, 64, 3).contiguous()),
        ("float64", small(64, 5, torch.float64), filters(96, 64, 3, torch.float64)),
        ("many pixels", small(64, 12), filters(96, 64, 3)),
        ("no samples", small(64, 5, samples=0), filters(96, 64, 3)),
    ):
        assert ready(of(), x, weight) is None, name
    for threads, kernel, samples, stride, want in (
        (1, 1, 16, 1, True),
        (1, 3, 8, 1, True),
        (1, 1, 8, 2, True),
        (1, 1, 8, 1, False),
        (1, 3, 1, 1, False),
        (2, 1, 8, 1, True),
    ):
        torch.set_num_threads(threads)
        layer, x, weight = of(kernel, stride, kernel // 2), small(64, 5, samples=samples), filters(96, 64, kernel)
        laid_out = ready(layer, x, weight)
        assert (laid_out is not None) == want, (threads, kernel, samples, stride)
        assert laid_out is None or torch.equal(laid_out.compute(x, weight, None), layer.compute(x, weight, None))


def test_what_is_called_dilated_is_laid_out_too() -> None:
    x, weight = small(256, 5, samples=8), filters(512, 256, 1)
    options = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    ways = [weighted(F.conv2d, {**options, "groups": 1, "dilation": dilation}) for dilation in ((1, 1), (2, 2))]
    dilated = pointwise(*ways)
    laid_out = ready(packed(dilated, **options, may_dilate=True), x, weight)
    assert laid_out is not None and torch.equal(laid_out.compute(x, weight, None), dilated.compute(x, weight, None))
    assert ready(packed(dilated, **options), x, weight) is None


def test_in_bfloat16_no_weight_is_laid_out_with_amx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the gradient of the input has other bits for some sizes."""
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(resources, "CPU_INFO", info)
    monkeypatch.setattr(onednn, "has_packing", onednn.has_packing.__wrapped__)
    for flags, in_bfloat16 in (("avx512_bf16", True), ("avx512_bf16 amx_bf16 amx_tile", False)):
        info.write_text(f"flags : {flags}")
        for dtype in (torch.float32, torch.bfloat16):
            laid_out = ready(of(), small(64, 5, dtype), filters(96, 64, 3, dtype))
            assert (laid_out is not None) == (in_bfloat16 or dtype == torch.float32)
