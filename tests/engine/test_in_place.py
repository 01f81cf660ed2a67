"""Calls overwrite what nobody else reads, and only that: the numbers are those of the plain network."""

import copy
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.engine.network import network_of
from convoy.engine.program import overwriting
from convoy.ops.memory import Readers
from ranks import run_ranks

IMAGES = torch.randn(4, 3, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A convolution, a batch norm, and what `forward` does with them."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(3, 4, 3)
        self.work = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.work(self, x)


def relu_of_conv(net: Net, x: Tensor) -> Tensor:
    return F.relu(net.conv(x))


def relu_of_norm(net: Net, x: Tensor) -> Tensor:
    return F.relu(net.norm(net.conv(x)), inplace=True)


def relu_of_sum(net: Net, x: Tensor) -> Tensor:
    return F.relu(net.norm(net.conv(x)) + net.other(x))


def relu_of_joined(net: Net, x: Tensor) -> Tensor:
    return torch.cat([net.conv(x), net.other(x)], 1).relu()


def sum_with_a_vector(net: Net, x: Tensor) -> Tensor:
    return net.conv(x).mean((2, 3), keepdim=True) + net.other(x)


def read_twice(net: Net, x: Tensor) -> Tensor:
    y = net.conv(x)
    return F.relu(y) + y.exp()


def relu_of_relu(net: Net, x: Tensor) -> Tensor:
    return F.relu(F.relu(net.conv(x)))  # the backward pass of the inner one reads its output


def relu_of_a_view(net: Net, x: Tensor) -> Tensor:
    y = net.conv(x)
    return y.flatten(1).relu() + y.flatten(1).exp()


def relu_of_the_images(net: Net, x: Tensor) -> Tensor:
    return net.conv(F.relu(x))


WRITES = {relu_of_conv: 1, relu_of_norm: 1, relu_of_sum: 2, relu_of_joined: 1, sum_with_a_vector: 1}
KEEPS = (read_twice, relu_of_relu, relu_of_a_view, relu_of_the_images)


def build(forward: Callable[..., Tensor]) -> Net:
    torch.manual_seed(0)
    return Net(forward).double()


def overwritten(forward: Callable[..., Tensor]) -> int:
    """How many calls of the network overwrite an input."""
    net = convoy.parallelize(build(forward), "serial", example=IMAGES)
    placement = network_of(net).example_placement(training=True)
    readers = Readers(placement.graph, placement.outputs)
    return sum(overwriting(placed, readers) is not None for placed in placement.calls)


def trained(forward: Callable[..., Tensor], plan: str) -> list[tuple[Tensor, Tensor]]:
    """Output and gradients, beside those of the plain network."""
    plain = build(forward)
    net = convoy.parallelize(copy.deepcopy(plain), plan, example=IMAGES)
    mine = convoy.local_samples(net, len(IMAGES))
    images = IMAGES.clone()
    output = net(images[mine])
    output.square().mean().backward()
    assert torch.equal(images, IMAGES)
    expected = plain(IMAGES)
    expected.square().mean().backward()
    whole = convoy.gradients(net)
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return [(output, expected[mine]), *((whole[name], gradient) for name, gradient in wanted.items())]


def body(forward: Callable[..., Tensor], plan: str) -> float:
    pairs = trained(forward, plan)
    largest = max(float(b.abs().max()) for _, b in pairs)  # a bias before a batch norm has none of its own
    return max(float((a - b).abs().max()) for a, b in pairs) / largest


@pytest.mark.parametrize(("forward", "number"), WRITES.items())
def test_overwrites_what_nobody_else_reads(forward: Callable[..., Tensor], number: int) -> None:
    assert overwritten(forward) == number


def test_a_relu_of_a_relu_overwrites_only_the_convolution() -> None:
    assert overwritten(relu_of_relu) == 1


@pytest.mark.parametrize("forward", [read_twice, relu_of_a_view, relu_of_the_images])
def test_keeps_what_somebody_reads(forward: Callable[..., Tensor]) -> None:
    assert overwritten(forward) == 0


@pytest.mark.parametrize("forward", [*WRITES, *KEEPS])
@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "channel=2", "height=2"])
def test_numbers_are_those_of_the_plain_network(forward: Callable[..., Tensor], plan: str) -> None:
    assert max(run_ranks(body, 2, forward, plan)) < 1e-12


def careless(forward: Callable[..., Tensor], plan: str) -> float:
    with patch.object(Readers, "is_spare", lambda *_: True):
        return body(forward, plan)


@pytest.mark.parametrize("forward", [read_twice, relu_of_the_images])
def test_it_would_notice(forward: Callable[..., Tensor]) -> None:
    with pytest.raises(AssertionError):
        assert max(run_ranks(careless, 2, forward, "sample=2")) < 1e-12
