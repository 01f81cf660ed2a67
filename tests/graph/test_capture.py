"""A network becomes a list of calls that gives the same numbers, and is left as it was."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from convoy.graph.fake import Fakes, FakeTensor, storage
from convoy.graph.graph import Call, CaptureError, Graph
from convoy.ops import capture
from graph.replay import replay
from plans.made_graph import Does


def ops(graph: Graph) -> list[str]:
    return [call.op for call in graph.calls]


def by_name(graph: Graph) -> dict[str, Call]:
    return {call.name: call for call in graph.calls}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn(self.conv(x)))
        out += x
        return self.relu(self.drop(out))


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Tensors, modes of modules and all random numbers are what and where they were."""

    def state() -> tuple[object, ...]:
        tensors = {name: (id(one), one.tolist()) for name, one in model.state_dict(keep_vars=True).items()}
        states = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
        return tensors, [module.training for module in model.modules()], states

    before = state()
    yield
    assert state() == before


def test_the_network_is_left_as_it_was_in_the_modes_of_its_modules() -> None:
    model = Residual()
    model.bn.eval()
    with left_as_it_was(model):
        graphs = [capture(model, ((4, 3, 8, 8),), training) for training in (None, True, False)]
    assert [by_name(graph)["bn"].attributes["training"] for graph in graphs] == [False, True, False]
    assert ["dropout" in ops(graph) for graph in graphs] == [True, True, False]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 2).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 3


Doubled.__name__ = "square"  # a name that torch has, too


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x * 2
    return x * scale


@pytest.mark.filterwarnings("ignore:To copy construct")
def test_custom_functions_and_no_grad_keep_their_gradients() -> None:
    images = torch.randn(2, 3, requires_grad=True)
    for function, gradient, kinds in (
        (lambda x: Doubled.apply(x) + 1, 3 * torch.ones(2, 3), ["opaque", "elementwise"]),
        (without_gradient, 2 * images.detach(), None),
        (lambda x: x.new_tensor(x.detach() * 2) * x, 2 * images.detach(), None),
    ):
        graph = capture(Does(function), (images,))
        with torch.no_grad():
            assert ops(capture(Does(function), (images,))) == ops(graph)
        assert kinds in (None, ops(graph))
        (result,) = torch.autograd.grad(replay(graph, Does(function), (images,)).sum(), images)
        torch.testing.assert_close(result, gradient)
    assert Doubled.apply(torch.ones(1)).item() == 2


class Odd(nn.Module):
    """A convolution and a layer that does a function."""

    shift: Tensor

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.odd = Does(lambda x: function(self.odd, x))
        self.odd.scale = nn.Parameter(torch.ones(1))
        self.odd.register_buffer("shift", torch.zeros(1))
        self.odd.register_buffer("num_batches_tracked", torch.tensor(8))
        self.odd.table = torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(self.conv(x))


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x


FOREIGN = nn.Parameter(torch.ones(1))
REFUSED: dict[str, Callable[[Any, Tensor], Any]] = {
    "layer odd: it asks for the numbers in a tensor": lambda layer, x: x if x.sum() > 0 else -x,
    "randn draws random numbers in a way of its own": lambda layer, x: x + torch.randn(2, 1, 1, 1),
    "do not belong to one sample each": lambda layer, x: x * torch.rand(1, 1, 1, 1),
    "random numbers of python or numpy": lambda layer, x: x * random.random(),
    "mul_ changes odd.scale in place": lambda layer, x: x + layer.scale.data.mul_(2),
    "add_ changes a tensor that the network keeps": lambda layer, x: x + layer.table.add_(1),
    "replaces odd.shift in its forward pass": lambda layer, x: setattr(layer, "shift", layer.shift + 1) or x,
    "assigns to a part of a tensor": lambda layer, x: (x.__setitem__((slice(None), 0), 1), x)[1],
    "writes into out=": lambda layer, x: torch.add(x, 1, out=torch.empty(2, 4, 5, 5)),
    "switches autocast on by itself": lambda layer, x: under_autocast(x),
    "layer odd: it uses a parameter that is not among the network's own": lambda layer, x: x * FOREIGN,
    "it uses a parameter that is not among": lambda layer, x: x * (FOREIGN.data.requires_grad_() * 2),
    "odd: it asks for the numbers in a": lambda layer, x: x * layer.num_batches_tracked.item(),
    "it asks for the numbers": lambda layer, x: x * float(layer.num_batches_tracked.add_(1)),
    "add_ changes odd.num_batches_tracked in place": lambda layer, x: x * layer.num_batches_tracked.add_(2),
    "replaces odd.num_": lambda layer, x: setattr(layer, "num_batches_tracked", layer.num_batches_tracked + 1) or x,
    "copy_ changes a tensor in place": lambda layer, x: x * layer.shift.copy_(x.mean((0, 1, 2, 3))[None]),
    "rand draws random numbers in a way": lambda layer, x: x * torch.rand(2, 1, 1, 1, generator=torch.Generator()),
    "asks whether a tensor requires a gradient": lambda layer, x: x * 2 if x.requires_grad else x,
    "odd: it asks whether a tensor requires a": lambda layer, x: x if (x + 1).grad_fn is None else x * 2,
    "odd: it asks whether": lambda layer, x: x if x.flatten().is_leaf else x * 2,
    "dropout3d draws random numbers for numbers that belong to no sample": lambda layer, x: F.dropout3d(x),
}


def test_what_a_graph_cannot_say_is_refused_and_leaves_the_network_alone(caplog: pytest.LogCaptureFixture) -> None:
    for message, function in REFUSED.items():
        model = Odd(function)
        model.odd.eval()
        with left_as_it_was(model), pytest.raises(CaptureError, match=message) as caught:
            capture(model, ((2, 3, 5, 5),))
        assert caught.value.layer == "odd" or any(word in message for word in ("python", "replaces"))
        images = torch.ones(1, 3, 2, 2)
        assert torch.equal(model.conv(images), model.conv(images))
    assert caplog.records == []  # torch logs nothing of its own


def test_weights_and_libraries_may_be_asked_for_gradients() -> None:
    of_library = eval("lambda x: x * 2 if x.requires_grad else x", {"__name__": "torchvision.models.densenet"})
    for function in (lambda layer, x: x * 2 if layer.scale.requires_grad else x, lambda layer, x: of_library(x) + 1):
        model = Odd(function)
        assert len(capture(model, ((2, 3, 5, 5),)).calls) == 2
    model = Odd(lambda layer, x: x * 2 if layer.scale.requires_grad or layer.shift.requires_grad else x)
    model.odd.scale.requires_grad_(False)
    assert len(capture(model, ((2, 3, 5, 5),)).calls) == 1


def test_numbers_are_drawn_with_the_probability_that_is_asked_for() -> None:
    draws: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: torch.bernoulli(x, 0.25),
        lambda x: torch.bernoulli(x * 0.25),
        lambda x: x.bernoulli(p=0.25),
        lambda x: x.bernoulli_(0.25),
        lambda x: x.bernoulli_(torch.tensor(0.25)),
    )
    for draw in draws:
        graph = capture(Does(lambda x, draw=draw: x * draw(torch.ones(len(x), 1))), ((8, 3),))
        assert [call.attributes.get("p") for call in graph.calls] == [0.25, None]


def test_torchs_private_module_still_does_what_the_capture_needs() -> None:
    fakes = Fakes()
    with fakes:
        tensor = torch.empty(2, 3) + torch.ones(3)
        assert isinstance(tensor, FakeTensor) and tensor.shape == (2, 3)
        assert storage(tensor.view(6)) == storage(tensor) != storage(tensor + 1)
        with fakes.real():
            assert torch.arange(3).tolist() == [0, 1, 2]
        draws = []
        for call in (
            lambda: F.scaled_dot_product_attention(tensor, tensor, tensor),
            lambda: F.dropout(tensor, 0.5),
            lambda: F.scaled_dot_product_attention(tensor, tensor, tensor, dropout_p=0.5),
        ):
            call()
            draws.append(fakes.draws)
        assert draws[0] == 0 < draws[1] < draws[2]
    assert not isinstance(torch.ones(1), FakeTensor)
