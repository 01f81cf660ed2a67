"""Predicted memory and postponed gradients, beside what a real pass of torch gives and keeps."""

import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.engine.network import network_of
from convoy.models import create
from convoy.ops.convolution import weighted
from convoy.ops.memory import predict_memory
from convoy.ops.postponed import PostponedGradients
from convoy.planner.workload import workload_of
from convoy.plans.plan import Plan
from plans.made_graph import placed, same_net, small_net
from ranks import run_ranks


def kept_bytes(model: nn.Module, images: Tensor) -> int:
    """Bytes of the storages that autograd really keeps, parameters and buffers not among them."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(images)
    assert output is not None
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(size for pointer, size in storages.items() if pointer not in own)


def test_memory_is_that_of_a_real_pass() -> None:
    for precision in (None, torch.bfloat16):
        model = create("resnet18", num_classes=4)
        workload = workload_of(model, torch.randn(1, 3, 32, 32), 8, precision=precision)
        (memory,) = predict_memory(workload.place(Plan.parse("serial")))
        with torch.autocast("cpu", precision, enabled=precision is not None):
            assert memory.activations == pytest.approx(kept_bytes(model, torch.randn(8, 3, 32, 32)), rel=0.03)
    (memory,), model = predict_memory(placed(small_net(), "serial")), same_net()  # to the byte
    assert memory.parameters == memory.gradients == sum(4 * p.numel() for p in model.parameters())
    assert memory.activations == kept_bytes(model, torch.zeros(8, 3, 16, 16))
    assert predict_memory(placed(small_net(), "serial"), in_flight=3)[0].activations == 3 * memory.activations
    assert predict_memory(placed(small_net(), "sample=2"))[0].activations * 2 == memory.activations


def kept_under(plan: str) -> tuple[int, int]:
    """Bytes of activations of this rank in training, measured and predicted."""
    first = nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(3, 2, 1), nn.Dropout()
    images = torch.randn(2, 3, 16, 16)
    net = nn.Sequential(*first, nn.AvgPool2d(3, 1, 1), nn.Conv2d(8, 8, 1))
    net = convoy.parallelize(net, plan, example=images)
    network = network_of(net)
    memory = predict_memory(network.example_placement(True))[network.groups.rank]
    return kept_bytes(net, images), memory.activations


def test_padded_copies_and_masks_are_kept_where_rows_are_divided() -> None:
    for plan in ("height=2", "width=2"):
        assert all(measured == predicted for measured, predicted in run_ranks(kept_under, 2, plan))


OPTIONS = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
NUM_PARTS = 32


def gradients(layer: nn.Conv2d, low: torch.dtype | None, postponed: PostponedGradients | None) -> list[Tensor]:
    """Of weight and bias: of each part by itself, added up as autograd does, or of all parts afterwards."""
    layer.zero_grad()
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_PARTS):
        x = torch.randn(2, 4, 8, 8, dtype=layer.weight.dtype, generator=generator) + 1
        run = partial(F.conv2d, **OPTIONS)
        if postponed is not None:
            postponed.begin_part()
            run = partial(postponed.forward, "layer", weighted(F.conv2d, OPTIONS))
        with nullcontext() if low is None else torch.autocast("cpu", low):
            y = run(x, layer.weight, layer.bias)
        (y * (1 + y.detach())).mean().backward()
    if postponed is not None:
        assert postponed.compute(NUM_PARTS - 1)
    return [p.grad.clone() for p in layer.parameters()]  # type: ignore[union-attr]


def worst(low: torch.dtype | None, postponed: PostponedGradients | None, dtype: torch.dtype = torch.float32) -> float:
    """The largest error of a gradient, relative to that without autocast."""
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 8, 3, padding=1).to(dtype)
    reference, trial = gradients(layer, None, None), gradients(layer, low, postponed)
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(trial, reference, strict=True))


def test_postponed_gradients_are_added_up_in_the_precision_of_the_weight() -> None:
    at_once = worst(torch.bfloat16, None)
    assert at_once > 1e-4, "autocast rounds"
    assert worst(torch.bfloat16, PostponedGradients()) < 1.2 * at_once
    assert worst(torch.bfloat16, PostponedGradients(), torch.float64) < 1e-12


def test_an_output_that_somebody_keeps_keeps_no_activations() -> None:
    postponed, layer = PostponedGradients(), nn.Conv2d(4, 8, 3, padding=1)
    postponed.begin_part()
    hidden = 2 * torch.randn(2, 4, 8, 8)
    held = weakref.ref(hidden)
    y = postponed.forward("layer", weighted(F.conv2d, OPTIONS), hidden, layer.weight, layer.bias)
    y.mean().backward()
    del hidden
    assert held() is not None, "until the weight gradients are computed"
    postponed.compute(0)
    assert held() is None and y.grad_fn is not None
