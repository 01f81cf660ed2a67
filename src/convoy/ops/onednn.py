"""Convolutions on CPUs by oneDNN, called as is fastest for the small parts into which a batch is divided.

torch leaves some of them to other kernels, and has oneDNN lay out the weight anew in every call: with few samples that
takes longer than the convolution itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.ops.postponed import Weighted
from convoy.resources import has_amx

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
    ResNet-50 up to twice as long. A dilated convolution goes to oneDNN, but for a single small image.

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


# pixels of the output, of all samples together, up to which a weight is laid out once for several inputs
FEW_PIXELS = 1024


def packed(
    layer: Weighted,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    may_dilate: bool = False,
) -> Weighted:
    """A 2-d convolution of one group, whose `prepare` has oneDNN lay out the weight once for several inputs; with
    `may_dilate` it is called dilated where that is better (`pointwise`). Outputs and gradients have the same bits. That
    takes the memory of two copies of the weight for each size of input (`docs/benchmarks/small-passes.md`)."""

    def prepare(x: Tensor, weight: Tensor) -> Weighted | None:
        spans = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        sizes = [
            (size + 2 * p - span - 1) // s + 1
            for size, p, span, s in zip(x.shape[2:], padding, spans, stride, strict=True)
        ]
        if not _is_packable(x, weight) or not 0 < len(x) * prod(sizes) <= FEW_PIXELS:
            return None
        if not (_is_onednns(x, weight, stride, dilation) or (may_dilate and is_better_dilated(x, weight))):
            return None  # another kernel rounds otherwise
        rest = [
            size - ((out - 1) * s - 2 * p + span + 1)
            for size, out, s, p, span in zip(x.shape[2:], sizes, stride, padding, spans, strict=True)
        ]
        packed_weight = _Packed(weight, list(padding), rest, list(stride), list(dilation))
        return replace(layer, compute=packed_weight.compute, input_gradient=packed_weight.input_gradient, prepare=None)

    return replace(layer, prepare=prepare)


@dataclass
class _Packed:
    """A weight, [filters, channels, height, width] and channels_last, as oneDNN wants it for the forward pass and for
    the gradient of the input."""

    weight: Tensor
    padding: list[int]
    rest: list[int]  # rows and columns at the end of the input that no filter reaches
    stride: list[int]
    dilation: list[int]
    _forward: Tensor | None = field(default=None, init=False)
    _backward: Tensor | None = field(default=None, init=False)

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        settings = self.padding, self.stride, self.dilation, 1
        if self._forward is None:
            self._forward = torch.ops.mkldnn._reorder_convolution_weight(self.weight, *settings, list(x.shape))
        x = x.contiguous(memory_format=torch.channels_last)
        y: Tensor = torch.ops.mkldnn._convolution_pointwise(x, self._forward, bias, *settings, "none", [], "")
        return y

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        settings = self.padding, self.rest, self.stride, self.dilation, 1
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        if self._backward is None:
            shape = list(gradient.shape)
            self._backward = torch.ops.mkldnn._reorder_convolution_transpose_weight(self.weight, *settings, shape)
        result: Tensor = torch.ops.mkldnn._convolution_transpose_pointwise(
            gradient, self._backward, None, *settings, "none", [], ""
        )
        return result


def _is_onednns(x: Tensor, weight: Tensor, stride: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether torch gives a convolution of one group to oneDNN by itself (`use_mkldnn` in its Convolution.cpp)."""
    if x.dtype == torch.bfloat16:
        return True
    kernel = weight.shape[2:]
    is_large = (*kernel, *stride, *dilation) != (1,) * 6
    is_small_image = len(x) == 1 and min(kernel) <= 3 and x.numel() <= _SMALL_IMAGE
    return (is_large or len(x) >= _FEW_SAMPLES or torch.get_num_threads() > 1) and not is_small_image


def _is_packable(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN can compute with a weight that was laid out before, with the bits that it has otherwise."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16) or torch.compiler.is_compiling():
        return False
    is_channels_last = all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (x, weight))
    return is_channels_last and bool(torch.backends.mkldnn.enabled) and has_packing(x.dtype)


@cache
def has_packing(dtype: torch.dtype = torch.float32) -> bool:
    """Whether this torch and processor have the calls, which are its compiler's and not documented, and they still do
    the same."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16 and has_amx():
        return False  # for some sizes the input's gradient has other bits, which the trial below does not show
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (
        torch.randn(shape, generator=generator).to(dtype).to(memory_format=torch.channels_last)
        for shape in ((2, 64, 5, 5), (96, 64, 3, 3), (2, 96, 3, 3))
    )
    trial, settings = _Packed(weight, [1, 1], [0, 0], [2, 2], [1, 1]), ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    try:
        results = trial.compute(x, weight, None), trial.input_gradient(gradient, x, weight)
    except (AttributeError, RuntimeError):
        return False
    expected = torch.ops.aten.convolution_backward(gradient, x, weight, None, *settings, (True, False, False))[0]
    return torch.equal(results[0], F.conv2d(x, weight, None, 2, 1)) and torch.equal(results[1], expected)
