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


def images() -> Tensor:
    return torch.randn((8, 1024, 4, 4), generator=torch.Generator().manual_seed(1))


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
