"""What a graph cannot say is refused by a sentence that names the layer, and leaves the network as it was."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.graph import CaptureError
from convoy.ops import capture


class Outer(nn.Module):
    """A convolution and a layer that does `function`."""

    def __init__(self, function: Callable[["Layer", Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.odd = Layer(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(self.conv(x))


class Layer(nn.Module):
    shift: Tensor

    def __init__(self, function: Callable[["Layer", Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.zeros(1))
        self.table = torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def changed_through_a_view(layer: Layer, x: Tensor) -> Tensor:
    x.view(-1).add_(1)
    return x


def assigned(layer: Layer, x: Tensor) -> Tensor:
    x[:, 0] = 1
    return x


def buffer_replaced(layer: Layer, x: Tensor) -> Tensor:
    layer.shift = layer.shift + 1
    return x


def written_out(layer: Layer, x: Tensor) -> Tensor:
    return torch.add(x, 1, out=torch.empty(2, 4, 5, 5))


REFUSED = {
    "branch on a value": (lambda layer, x: x if x.sum() > 0 else -x, "asks for the numbers in a tensor"),
    "number of a tensor": (lambda layer, x: x * float(x.mean()), "asks for the numbers in a tensor"),
    "normal noise": (lambda layer, x: x + torch.randn(2, 1, 1, 1), "randn draws random numbers in a way of its own"),
    "normal noise like": (lambda layer, x: x + torch.randn_like(x), "randn_like draws"),
    "noise of a constant": (lambda layer, x: x + torch.randn_like(layer.table), "randn_like draws"),
    "alpha dropout": (lambda layer, x: F.alpha_dropout(x, 0.5, True), "alpha_dropout draws"),
    "dropout of a parameter": (lambda layer, x: x * F.dropout(layer.scale), "of numbers that belong to no sample"),
    "one draw for the batch": (lambda layer, x: x * torch.rand(1, 1, 1, 1), "do not belong to one sample each"),
    "a draw for the layer": (lambda layer, x: x * torch.rand(()), "do not belong to one sample each"),
    "python's random": (lambda layer, x: x * random.random(), "random numbers of python or numpy"),
    "numpy's random": (lambda layer, x: x * float(np.random.rand()), "random numbers of python or numpy"),
    "parameter changed": (lambda layer, x: x + layer.scale.data.mul_(2), "mul_ changes odd.scale in place"),
    "buffer changed": (lambda layer, x: x + layer.shift.add_(1), "add_ changes odd.shift in place"),
    "table changed": (lambda layer, x: x + layer.table.add_(1), "add_ changes a tensor that the network keeps"),
    "buffer replaced": (buffer_replaced, "replaces odd.shift in its forward pass"),
    "view changed": (changed_through_a_view, "odd changed through a view"),
    "part assigned": (assigned, "assigns to a part of a tensor"),
    "out": (written_out, "writes into out="),
    "autocast": (lambda layer, x: autocast_inside(x), "switches autocast on by itself"),
    "empty read": (lambda layer, x: x + torch.empty(1), "nothing was written to"),
    "wrong size": (lambda layer, x: F.linear(x, torch.ones(3, 3)), "it raises RuntimeError in a trial without data"),
}


def autocast_inside(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_left_alone(case: str) -> None:
    function, message = REFUSED[case]
    model = Outer(function)
    model.odd.eval()
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    rng, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index]
    with pytest.raises(CaptureError, match=message) as caught:
        capture(model, ((2, 3, 5, 5),))
    if "python" not in message and "replaces" not in message and "through" not in message:
        assert caught.value.layer == "odd"
    after = model.state_dict(keep_vars=True)
    assert {name: id(tensor) for name, tensor in after.items()} == {name: was for name, (was, _) in before.items()}
    assert all(torch.equal(after[name], was) for name, (_, was) in before.items())
    assert model.training
    assert not model.odd.training
    assert torch.equal(torch.get_rng_state(), rng)
    assert random.getstate() == python
    assert (np.random.get_state()[1] == numpy).all()  # type: ignore[index]
    assert torch.equal(model.conv(torch.ones(1, 3, 2, 2)), model.conv(torch.ones(1, 3, 2, 2)))


def test_a_parameter_from_elsewhere_is_refused() -> None:
    foreign = nn.Parameter(torch.ones(1))
    with pytest.raises(CaptureError, match="layer odd: it uses a parameter that is not among the network's own"):
        capture(Outer(lambda layer, x: x * foreign), ((2, 3, 5, 5),))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused() -> None:
    scripted = torch.jit.trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), torch.ones(2, 3, 5, 5))
    with pytest.raises(CaptureError, match="layer 0: it is TorchScript"):
        capture(nn.Sequential(scripted, nn.Flatten()), ((2, 3, 5, 5),))


def test_torch_logs_nothing_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CaptureError, match="Output size is too small"):
        capture(Outer(lambda layer, x: F.avg_pool2d(x, 9)), ((2, 3, 5, 5),))
    assert caplog.records == []
