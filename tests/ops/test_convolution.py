"""Convolutions of small passes: by which kernel torch computes them, and that nothing else changes."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

import convoy


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kernels(net: nn.Module, x: Tensor) -> set[str]:
    """The functions of torch by which a forward and a backward pass compute convolutions."""
    with profile() as events:
        net(x).square().sum().backward()
    return {event.key for event in events.key_averages() if "conv" in event.key}


@pytest.mark.usefixtures("one_thread")
def test_small_passes_are_left_to_onednn_and_numbers_differ_by_rounding_alone() -> None:
    torch.manual_seed(0)
    plain, images = nn.Sequential(nn.Conv2d(1024, 256, 1)), torch.randn(8, 1024, 4, 4)
    net = convoy.parallelize(copy.deepcopy(plain), "serial", example=images, batch_norm="microbatch")
    slow, fast = kernels(plain, images), kernels(net, images)
    assert any("slow_conv2d" in name for name in slow), "torch chooses otherwise now: is_better_dilated can go"
    assert "aten::mkldnn_convolution" in fast and not any("slow_conv2d" in name for name in fast)
    for want, got in zip(plain.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-4 * float(want.grad.abs().max()))
