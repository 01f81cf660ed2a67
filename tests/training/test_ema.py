import copy

import pytest
import torch
from torch import nn

from convoy.training.state import AveragedWeights, effective_decay


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def walk(net: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    net(torch.randn(5, 3, generator=generator, dtype=torch.float64))


def test_it_is_the_formula() -> None:
    net = network()
    averaged = AveragedWeights(net, 0.3)
    want: dict[str, torch.Tensor] = {}
    for step in range(8):
        walk(net, step)
        averaged.update(net)
        decay = 0.0 if step == 0 else min(0.3, (1 + step) / (10 + step))
        for name, parameter in net.named_parameters():
            want[name] = decay * want.get(name, torch.zeros_like(parameter)) + (1 - decay) * parameter.detach()
    trained = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    with averaged.in_place(net):
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(parameter.detach(), want[name], rtol=1e-12, atol=0)
            assert not torch.equal(parameter, trained[name])
    assert all(torch.equal(parameter, trained[name]) for name, parameter in net.named_parameters())


def test_buffers_are_those_of_the_trained_model() -> None:
    net = network()
    averaged = AveragedWeights(net, 0.9)
    for step in range(3):
        walk(net, step)
        averaged.update(net)
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with averaged.in_place(net):
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in net.named_buffers())
    assert net[1].num_batches_tracked == 3


def test_it_resumes_exactly() -> None:
    net = network()
    whole, half = AveragedWeights(net, 0.9), AveragedWeights(net, 0.9)
    for step in range(6):
        walk(net, step)
        whole.update(net)
        half.update(net)
        if step == 2:
            saved = copy.deepcopy(half.averages)
            half = AveragedWeights(network(), 0.9)
            half.load(saved, 3)
    assert all(torch.equal(average, half.averages[name]) for name, average in whole.averages.items())


@pytest.mark.parametrize(("num_updates", "decay"), [(1, 2 / 11), (10, 11 / 20), (8_990, 0.999), (10**6, 0.999)])
def test_the_decay_rises_to_its_value(num_updates: int, decay: float) -> None:
    assert effective_decay(0.999, num_updates) == pytest.approx(decay)
