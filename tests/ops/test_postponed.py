"""Postponed weight gradients are those of a backward pass that computes them at once, in the same precision."""

import weakref
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.ops.convolution import weighted
from convoy.ops.postponed import PostponedGradients

OPTIONS = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
NUM_PARTS = 32


def parts_of(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 8, 8, dtype=dtype, generator=generator) + 1 for _ in range(NUM_PARTS)]


def gradients(layer: nn.Conv2d, low: torch.dtype | None, postponed: PostponedGradients | None) -> list[Tensor]:
    """Of weight and bias: of each part by itself, added up as autograd does, or of all parts afterwards."""
    layer.zero_grad()
    for x in parts_of(layer.weight.dtype):
        run = partial(F.conv2d, **OPTIONS)
        if postponed is not None:
            postponed.begin_part()
            run = partial(postponed.forward, "layer", weighted(F.conv2d, OPTIONS))
        with nullcontext() if low is None else torch.autocast("cpu", low):
            y = run(x, layer.weight, layer.bias)
        (y * (1 + y.detach())).mean().backward()
    if postponed is not None:
        assert postponed.compute(NUM_PARTS - 1)
    return [p.grad for p in layer.parameters()]


def worst(low: torch.dtype | None, postponed: PostponedGradients | None, dtype: torch.dtype = torch.float32) -> float:
    """The largest error of a gradient, relative to that without autocast."""
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 8, 3, padding=1).to(dtype)
    exact = [x.clone() for x in gradients(layer, None, None)]
    found = gradients(layer, low, postponed)
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True))


def test_parts_are_added_up_in_the_precision_of_the_weight() -> None:
    at_once = worst(torch.bfloat16, None)
    assert at_once > 1e-4, "autocast rounds"
    assert worst(torch.bfloat16, PostponedGradients()) < 1.2 * at_once


def test_autocast_leaves_double_precision_as_it_is() -> None:
    assert worst(torch.bfloat16, PostponedGradients(), torch.float64) < 1e-12


def test_an_output_that_somebody_keeps_keeps_no_activations() -> None:
    postponed = PostponedGradients()
    postponed.begin_part()
    layer, x = nn.Conv2d(4, 8, 3, padding=1), torch.randn(2, 4, 8, 8)
    hidden = 2 * x
    held = weakref.ref(hidden)
    y = postponed.forward("layer", weighted(F.conv2d, OPTIONS), hidden, layer.weight, layer.bias)
    y.mean().backward()
    del hidden
    assert held() is not None, "until the weight gradients are computed"
    postponed.compute(0)
    assert held() is None
    assert y.grad_fn is not None
