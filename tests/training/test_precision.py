from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import convoy
from convoy.engine.parallelize import take_part
from convoy.errors import ConvoyError
from convoy.training.environment import join_ranks
from convoy.training.precision import Scaler, check_precision
from ranks import run_ranks

CPU = torch.device("cpu")
IMAGES = torch.ones(2, 3, 4, 4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_every_cpu_does(precision: str) -> None:
    check_precision(precision, CPU)


def test_what_torch_cannot_do_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> torch.Tensor:
        raise RuntimeError("no kernel for Half\n[C++ lines]")

    monkeypatch.setattr(F, "conv2d", refuse)
    with pytest.raises(ConvoyError) as caught:
        check_precision("fp16", CPU)
    assert str(caught.value) == "precision=fp16 does not train on cpu here (no kernel for Half): choose bf16 or fp32"


def test_gradients_that_are_not_finite_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w: linear(x, w) * float("inf"))
    with pytest.raises(ConvoyError, match="gradients are not finite"):
        check_precision("bf16", CPU)


class Overflow(NamedTuple):
    """What one rank has after each of some updates."""

    weights: list[torch.Tensor]
    scales: list[float]


def updates(plan: str, agree: bool) -> Overflow:
    """Four updates of a network under a plan; in the second one, rank 1's own gradient overflows."""
    torch.manual_seed(0)
    ranks, device = join_ranks()
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 6))
    take_part(net, plan, IMAGES)  # as the trainer does: gradients do not agree by themselves
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = Scaler(device, "fp16", ranks.any if agree else bool)
    found = Overflow([], [])
    for update in range(4):
        optimizer.zero_grad()
        scaler.scale(net(IMAGES).square().mean()).backward()
        if update == 1 and ranks.rank == 1:
            net[2].weight.grad[0, 0] = float("inf")
        if update != 2:  # also where nobody clips
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found.weights.append(torch.cat([p.flatten() for p in convoy.state_dict(net).values()]))
        found.scales.append(scaler.get_scale())
    return found


@pytest.mark.parametrize("plan", ["filter=2", "sample=2"])
def test_all_ranks_skip_an_update_in_which_one_overflows(plan: str) -> None:
    first, second = run_ranks(updates, 2, plan, True)
    assert first.scales == second.scales
    assert first.scales[1] == first.scales[0] / 2 == first.scales[3]
    for mine, other in zip(first.weights, second.weights, strict=True):
        assert torch.equal(mine, other)
    assert torch.equal(first.weights[0], first.weights[1])
    assert not torch.equal(first.weights[1], first.weights[2])
    assert not torch.equal(first.weights[2], first.weights[3])


def test_without_agreement_ranks_would_drift_apart() -> None:
    first, second = run_ranks(updates, 2, "filter=2", False)
    assert first.scales != second.scales


def test_other_precisions_ask_nobody() -> None:
    def asked(here: bool) -> bool:
        raise AssertionError

    scaler = Scaler(CPU, "bf16", asked)
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight, torch.zeros(2))
