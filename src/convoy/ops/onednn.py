"""1 × 1 convolutions of small passes on CPUs, which torch leaves to a slower kernel than oneDNN's."""

from math import prod
from typing import TypeGuard

import torch
from torch import Tensor, nn

from convoy.ops.postponed import Weighted

POINT, DILATED = (1, 1), (2, 2)
_FEW_SAMPLES = 16
# numbers of a single sample up to which torch computes it without oneDNN in any case (`use_mkldnn`)
_SMALL_IMAGE = 20480
# multiplications for which oneDNN is worth the 100 µs that it takes to begin; measured from 2**20 to 2**25
_WORTH_ONEDNN = 2**22


def is_torchs(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a module is torch's own 2-d convolution, which computes with its image as it is given. Only such layers
    are called dilated."""
    return type(module) is nn.Conv2d and module.padding_mode == "zeros"


def is_better_dilated(x: Tensor, weight: Tensor) -> bool:
    """Whether a convolution with filters of 1 × 1 is faster when it is called dilated, which changes nothing else.

    With one thread and fewer than 16 samples, torch 2.13 computes such a convolution in float32 without oneDNN, by a
    matrix product for each sample (`use_mkldnn` in its Convolution.cpp), which takes a pass of 8 images through
    ResNet-50 up to 2.26 times as long (docs/benchmarks/small-passes.md). A dilated convolution goes to oneDNN, but for
    a single small image. `torch.mkldnn_convolution` would, too, but its backward pass chooses anew.

    >>> x, weight = torch.ones(8, 1024, 4, 4), torch.ones(256, 1024, 1, 1)
    >>> torch.equal(F.conv2d(x, weight, dilation=2), F.conv2d(x, weight))
    True
    """
    if torch.compiler.is_compiling() or x.dtype != torch.float32 or x.device.type != "cpu":
        return False
    samples, _, *pixels = x.shape
    if samples >= _FEW_SAMPLES or prod(pixels) == 1 or samples * prod(pixels) * weight.numel() < _WORTH_ONEDNN:
        return False
    if (samples == 1 and x.numel() <= _SMALL_IMAGE) or torch.is_autocast_enabled("cpu"):
        return False
    has_onednn = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    return has_onednn and torch.get_num_threads() == 1


def pointwise(plain: Weighted, dilated: Weighted) -> Weighted:
    """A convolution with filters of 1 × 1, called as is faster; its gradients go the way of its forward pass."""

    def of(x: Tensor, weight: Tensor) -> Weighted:
        return dilated if is_better_dilated(x, weight) else plain

    return Weighted(
        lambda x, weight, bias: of(x, weight).compute(x, weight, bias),
        lambda gradient, x, weight: of(x, weight).input_gradient(gradient, x, weight),
        lambda gradient, x, weight, biased: of(x, weight).weight_gradients(gradient, x, weight, biased),
    )
