"""Convolutions of small passes: by which kernel torch computes them, and that nothing else changes."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import profile

import convoy
from convoy.ops import convolution
from convoy.ops.convolution import weighted
from convoy.ops.onednn import packed
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


def layer(kind: type[nn.Conv2d] = nn.Conv2d) -> nn.Conv2d:
    torch.manual_seed(0)
    return kind(1024, 256, 1)


def images(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape or (8, 1024, 4, 4), generator=torch.Generator().manual_seed(1)).to(dtype)
    return x.to(memory_format=torch.channels_last) if shape else x


def kernels(run: nn.Module, x: Tensor) -> set[str]:
    """The functions of torch by which a forward and a backward pass compute convolutions."""
    with profile() as found:
        run(x).sum().backward()
    return {event.key for event in found.key_averages() if "conv" in event.key}


def prepared(plain: nn.Module) -> nn.Sequential:
    model = nn.Sequential(copy.deepcopy(plain))
    return convoy.parallelize(model, "serial", example=images(), batch_norm="microbatch")


def test_small_passes_are_left_to_onednn_and_numbers_differ_by_rounding_alone() -> None:
    plain, model, x = layer(), prepared(layer()), images()
    slow, fast = kernels(nn.Sequential(layer()), x), kernels(model, x)
    assert any("slow_conv2d" in name for name in slow), "torch chooses otherwise now: is_better_dilated can go"
    assert "aten::mkldnn_convolution" in fast and not any("slow_conv2d" in name for name in fast)
    model.zero_grad()
    for net in (plain, model):
        net(x).square().sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-4 * float(one.grad.abs().max()))


def test_layers_of_torch_alone_use_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (nn.Conv2d, Own):
        want = prepared(layer(kind))(images())
        with monkeypatch.context() as patch:
            patch.setattr(convolution, "is_torchs", lambda _, kind=kind: kind is Own)
            assert not torch.equal(prepared(layer(kind))(images()), want), "the kernels round alike"


def ready(kernel: int, stride: int, padding: int, dilation: int, x: Tensor, weight: Tensor) -> list[Weighted | None]:
    """A convolution as it is, and with its weight laid out for images like these; None where it is not."""
    pairs = {"stride": (stride, stride), "padding": (padding, padding), "dilation": (dilation, dilation)}
    plain = packed(weighted(F.conv2d, {**pairs, "groups": 1}), **pairs)
    assert plain.prepare is not None
    return [plain, plain.prepare(x, weight)]


SIZES = ((3, 1, 1, 1), (1, 1, 0, 1), (1, 2, 0, 1), (3, 2, 1, 1), (3, 3, 0, 1), (2, 2, 1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_laid_out_once_gives_the_same_bits(dtype: torch.dtype) -> None:
    for number, size in enumerate(SIZES):
        x, weight = images(16, 64, 5, 6, dtype=dtype), images(96, 64, size[0], size[0], dtype=dtype)
        plain, laid_out = ready(*size, x, weight)
        if dtype == torch.bfloat16 and has_amx():
            assert laid_out is None
            continue
        bias = torch.arange(96.0).to(dtype) if number % 2 else None
        assert plain is not None and laid_out is not None, "this torch packs no weights: this test shows nothing"
        for pictures in (x, x.flip(0).contiguous(memory_format=torch.channels_last)):  # the weight is there already
            y, expected = laid_out.compute(pictures, weight, bias), plain.compute(pictures, weight, bias)
            assert torch.equal(y, expected) and y.stride() == expected.stride()
            back, expected = (way.input_gradient(torch.sin(y), pictures, weight) for way in (laid_out, plain))
            assert torch.equal(back, expected) and back.stride() == expected.stride()
        assert not torch.equal(laid_out.compute(x, weight + 1, bias), plain.compute(x, weight + 1, bias)), "it is kept"
    x, weight = images(8, 64, 5, 6), images(96, 64, 1, 1)  # which torch leaves to another kernel
    assert ready(1, 1, 0, 1, x, weight)[1] is None
