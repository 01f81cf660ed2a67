"""Evaluation under `torch.inference_mode`, before and between training steps."""

import copy

import pytest
import torch
import torch.nn.functional as F
from test_coupled import UNSEEN, Coupled
from torch import nn

import convoy
from convoy.engine.network import network_of
from ranks import run_ranks
from small_nets import SMALL_NETS


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return (Coupled(UNSEEN["choice"]) if name == "uncaptured" else SMALL_NETS[name]()).double()


def errors(name: str, plan: str, parallelize_inside: bool) -> list[float]:
    """Of the outputs and gradients in turns of evaluation and training."""
    serial = build(name)
    for module in serial.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    example = torch.zeros(2, 3, 8, 8, dtype=torch.float64)
    twin = copy.deepcopy(serial).eval()
    with torch.inference_mode(parallelize_inside):
        net = convoy.parallelize(twin, plan, example)
    found = []
    for samples in (5, 4, 5):
        x = torch.randn(samples, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(samples))
        y = torch.arange(samples)
        mine = convoy.local_samples(net, samples)
        with torch.inference_mode():
            got, want = net.eval()(x[mine]), serial.eval()(x)
        assert not got.requires_grad
        found.append((got - want[mine]).abs().max().item())
        for model, inputs, labels in ((serial, x, y), (net, x[mine], y[mine])):
            model.zero_grad()
            F.cross_entropy(model.train()(inputs), labels).backward()
        whole = convoy.gradients(net)
        found += [(whole[name] - p.grad).abs().max().item() for name, p in serial.named_parameters()]
        with torch.inference_mode():  # the program of this mode and size is kept for training
            net.train()(x[mine])
            serial.train()(x)
        assert len(network_of(net)._programs) <= 4
    return found


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "height=2"])
@pytest.mark.parametrize("name", ["dense", "shuffle", "permuted", "uncaptured"])
def test_inference_mode_and_training_take_turns(name: str, plan: str) -> None:
    for found in run_ranks(errors, 2, name, plan, plan == "filter=2"):
        assert max(found) < 1e-11


def test_inference_mode_on_one_device() -> None:
    (found,) = run_ranks(errors, 1, "depthwise", "serial", True)
    assert max(found) < 1e-11


def test_the_first_call_may_be_in_inference_mode() -> None:
    net = convoy.parallelize(build("shuffle"), "serial", torch.zeros(2, 3, 8, 8, dtype=torch.float64))
    with torch.inference_mode():
        net.train()(torch.ones(2, 3, 8, 8, dtype=torch.float64))
    net(torch.ones(2, 3, 8, 8, dtype=torch.float64)).sum().backward()
