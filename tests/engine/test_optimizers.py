"""Optimizers over divided parameters: as on one device, or refused before their first step."""

import copy
from typing import Any

import pytest
import torch
from own_loops import IMAGES, far, loss_of, ranks_net, small
from torch import nn

import convoy
from convoy.engine.optimizers import _looks_at_whole_tensors
from convoy.errors import ConvoyError
from ranks import run_ranks


class Lion(torch.optim.Optimizer):
    """Treats every number by itself, and nobody knows it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.add_((0.9 * mean + 0.1 * p.grad).tanh(), alpha=-group["lr"])
                mean.lerp_(p.grad, 0.01)


def make(name: str, net: nn.Module) -> torch.optim.Optimizer:
    parameters = list(net.parameters())
    if name == "Lion":
        return Lion(parameters, 0.01)
    if name == "Adafactor":
        return torch.optim.Adafactor(parameters)
    if name == "Muon":
        return torch.optim.Muon([p for p in parameters if p.dim() == 2])
    import pytorch_optimizer

    return getattr(pytorch_optimizer, name)(parameters, lr=0.01)


def optimized(name: str, plan: str) -> str | float:
    serial = small()
    serial[0] = nn.Conv2d(3, 6, 3, bias=False).double()  # a gradient that is nothing but rounding would be blown up
    net = convoy.parallelize(copy.deepcopy(serial), plan, IMAGES[:4])
    mine = convoy.local_samples(net, len(IMAGES))
    optimizer, alone = make(name, net), make(name, serial)
    try:
        for _ in range(3):
            for each, samples, opt in ((net, mine, optimizer), (serial, slice(None), alone)):
                opt.zero_grad()
                loss_of(each, samples).backward()
                opt.step()
    except ConvoyError as error:
        return str(error)
    return far(convoy.state_dict(net), serial.state_dict())


@pytest.mark.parametrize("name", ["Lamb", "LARS", "Adafactor", "Muon", "SOAP"])
def test_optimizers_that_look_at_whole_tensors_are_refused_on_parts(name: str) -> None:
    for said in run_ranks(optimized, 2, name, "filter=2"):
        assert isinstance(said, str) and said.startswith(f"{name} ") and "divided over ranks: take an optimizer" in said


@pytest.mark.parametrize(("name", "plan"), [("Lion", "filter=2"), ("AdaBelief", "filter=2"), ("Lamb", "sample=2")])
def test_other_optimizers_are_as_on_one_device(name: str, plan: str) -> None:
    for error in run_ranks(optimized, 2, name, plan):
        assert isinstance(error, float) and error < 1e-9


class Centered(Lion):
    """Takes a little of a tensor's mean gradient from every number."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad -= 0.02 * p.grad.mean()
        super().step()


@pytest.mark.parametrize(("kind", "whole"), [(Lion, None), (Centered, "looks at whole tensors")])
def test_low_precision_hides_nothing(kind: type[Lion], whole: str | None) -> None:
    weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    optimizer = kind([weight], 0.01)
    assert _looks_at_whole_tensors(optimizer, optimizer.param_groups[0], {2: weight}) == whole


def grouped() -> None:
    net, mine = ranks_net("filter=2")
    optimizer = make("Lamb", nn.Linear(2, 2).double())
    loss_of(net, mine).backward()
    optimizer.param_groups[0]["params"][0].grad = torch.zeros_like(optimizer.param_groups[0]["params"][0])
    optimizer.step()
    optimizer.add_param_group({"params": list(net.parameters())})
    with pytest.raises(ConvoyError, match="divided over ranks: take an optimizer"):
        optimizer.step()


def test_groups_that_come_later_are_looked_at() -> None:
    run_ranks(grouped, 2)
