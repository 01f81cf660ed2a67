"""Dropout and random numbers over a mesh: the very mask of one device."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.engine import SampleDropout, StepContext
from convoy.errors import ConvoyError
from convoy.ops.random_bits import layer_key, one_for_each, random_bits, sample_keys
from convoy.plans.layout import WHOLE, Layout, Split, consecutive, indices
from one_call import OneCall, run_call

SHAPE = (5, 6, 4, 3)
LISTS = (indices((5, 0, 2)), indices((1, 4, 3)))
LAYOUTS = [
    ((2,), Layout.of({0: Split((0,), consecutive((3, 2)))})),
    ((3,), Layout.of({0: Split((0,), consecutive((3, 0, 2)))})),
    ((2,), Layout.of({1: Split((0,), LISTS)})),
    ((2, 2), Layout.of({0: Split((0,), consecutive((4, 1))), 1: Split((1,), LISTS)})),
    ((2, 2), Layout.of({2: Split((0,), consecutive((3, 1))), 3: Split((1,), consecutive((1, 2)))})),
    ((2,), WHOLE),
]


def on_one_device(case: OneCall, name: str = "y") -> tuple[Tensor, Tensor]:
    context = StepContext(seed=3)
    layer = SampleDropout(name, case.attributes["p"], case.attributes["channels"], context)
    context.enter(7, 0, (len(case.gradient),), torch.device("cpu"))
    x = case.tensors["x"].clone().requires_grad_()
    y = layer(x)
    y.backward(case.gradient)
    assert x.grad is not None
    return y.detach(), x.grad


def dropout(sizes: tuple[int, ...], given: Layout, channels: bool, shape: tuple[int, ...] = SHAPE) -> OneCall:
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64)
    function = F.dropout2d if channels else F.dropout
    attributes = {"input": "x", "p": 0.4, "channels": channels}
    return OneCall("dropout", function, {"x": x}, attributes, sizes, given, torch.randn_like(x))


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize(("sizes", "given"), LAYOUTS)
def test_the_mask_is_that_of_one_device(sizes: tuple[int, ...], given: Layout, channels: bool) -> None:
    case = dropout(sizes, given, channels)
    got = run_call(case)
    y, grad = on_one_device(case)
    assert torch.equal(got["y"], y)
    assert torch.equal(got["x.grad"], grad)
    assert not torch.equal(got["y"], on_one_device(case, "z")[0])  # the control: another layer, another mask


def test_samples_that_cannot_be_told_apart_are_refused() -> None:
    case = dropout((2,), Layout.of({0: Split((0,), consecutive((3, 2)))}), False)
    case.gradient = case.tensors["x"] = case.tensors["x"].view(10, 3, 4, 3)
    with pytest.raises(ConvoyError, match="layer 'layer' drops elements of 10 samples of a batch of 5"):
        case.placed()


def test_one_number_for_each_sample_of_all_layers_is_that_of_each_layer() -> None:
    keys = sample_keys(3, 5, range(100))
    layers = [layer_key(name) for name in ("blocks.0.drop", "blocks.1.drop", "head")]
    together = one_for_each(keys, torch.tensor(layers, dtype=torch.int32))
    for layer, found in zip(layers, together, strict=True):
        assert torch.equal(found, random_bits(keys, layer, 1)[:, 0])


@pytest.mark.parametrize(("draw", "p"), [("bernoulli", 0.7), ("bernoulli", 1.0), ("bernoulli", 0.0), ("uniform", None)])
def test_random_numbers_of_samples(draw: str, p: float | None) -> None:
    shape = (2000, 1, 1)
    whole, divided = (
        run_call(
            OneCall("random", torch.rand, {}, {"draw": draw, "p": p}, (2,), given, torch.zeros(shape)),
        )["y"]
        for given in (WHOLE, Layout.of({0: Split((0,), consecutive((1500, 500)))}))
    )
    assert torch.equal(whole, divided)
    mean = 0.5 if p is None else p
    assert abs(whole.mean() - mean) < 0.05
    if draw == "uniform":
        assert whole.min() >= 0
        assert whole.max() < 1
        assert abs(whole.var() - 1 / 12) < 0.01
