"""What is said of a parallelized network: how it was captured, which layers fell back, what is sent."""

from typing import Any

import pytest
import torch
from odd_nets import UNSEEN, coupled
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import convoy
from convoy import models
from convoy.errors import ConvoyError
from ranks import run_ranks


class Strange(nn.Module):
    """Calls something that nobody has a rule for."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linalg.svdvals(x).unsqueeze(-1)


class Own(nn.Conv2d):
    """A layer that decides by numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.isfinite().all() else x * 0)


def explained(kind: str) -> tuple[str, str]:
    """In training and in evaluation mode."""
    example = torch.zeros(2, 3, 8, 8)
    plan: Any = "filter=2"
    net: nn.Module
    if kind == "alexnet":
        net, plan, example = models.create("alexnet"), "owt=2", torch.zeros(16, 3, 224, 224)
    elif kind == "fallback":
        net = nn.Sequential(nn.Conv2d(3, 8, 3), Strange(), nn.Conv2d(8, 8, 3))
    elif kind == "stages":
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
        plan = {"mesh": {"stage": 2}, "stages": ["3"]}
    elif kind == "own layer":
        net = nn.Sequential(nn.Conv2d(3, 8, 3), Own(8, 8, 3), nn.Conv2d(8, 8, 3))
    else:
        net, plan = coupled(UNSEEN["choice"])(), {"mesh": {"gpu": 2}, "layers": {"conv": {"gpu": "filter"}}}
    net = convoy.parallelize(net, plan, example)
    training, evaluation = convoy.explain(net), convoy.explain(net.eval())
    if kind == "stages":
        convoy.forward_backward(net.train(), example, example, lambda y, x: y.mean(), schedule="zero-bubble")
        said = convoy.explain(net)
        assert "2 parts, schedule zero-bubble: stages of equal work wait 14 % of the time" in said, said
        net.eval()(example)
        assert convoy.explain(net.train()) == said
        net(example)
        assert convoy.explain(net) == training
    return training, evaluation


def test_alexnet_is_explained_as_in_the_handbook() -> None:
    training, evaluation = run_ranks(explained, 2, "alexnet")[1]
    assert training.startswith("plan owt=2\ntraining, 32 samples (16 + 16), 2 ranks, captured as one program\n\nlayer ")
    assert "classifier.1  linear  filter    features over owt  move over owt        590 kB    590 kB" in training
    assert "a rank sends 1.15 MB in the forward pass, 1.15 MB in the backward pass, 9.88 MB for gradients" in training
    assert evaluation.startswith("plan owt=2\nevaluation, 32 samples")


def test_layers_that_fall_back_are_named_with_the_reason() -> None:
    training, _ = run_ranks(explained, 2, "fallback")[0]
    assert "no rule for linalg_svdvals: runs whole on every rank: 1\n" in training
    training, _ = run_ranks(explained, 2, "own layer")[0]
    assert "captured whole on every rank, as layer 1: it asks for the numbers in a tensor" in training


STAGES = (
    "plan stage=2; stages begin at 3\n",
    "1      0          0      -                          -         -       896 B      3.84 kB",
    "2      3          1      2                     2.3 kB    2.3 kB     11.6 kB       2.3 kB",
    "a rank's samples go through the stages in 2 parts, schedule gpipe: stages of equal work wait 33 % of the time",
    "a rank sends 2.3 kB in the forward pass, 2.3 kB in the backward pass",
    "a rank of stage 2 holds most in all: 11.6 kB of 12.5 kB of parameters, 11.6 kB of gradients, 2.3 kB of activ",
)


def test_stages() -> None:
    first, second = run_ranks(explained, 2, "stages")
    assert first == second
    assert all(words in first[0] for words in STAGES), first[0]
    assert "in the backward pass" not in first[1]


def test_a_network_that_cannot_be_captured() -> None:
    (training, evaluation), second = run_ranks(explained, 2, "uncaptured")
    assert (training, evaluation) == second
    assert "captured whole on every rank, as it asks for the numbers in a tensor" in training
    assert training.endswith("every rank runs all layers on the whole batch")


def test_one_device_and_a_plain_network() -> None:
    net = models.create("lenet")
    with pytest.raises(ConvoyError, match="not parallelized"):
        convoy.explain(net)
    text = convoy.explain(convoy.parallelize(net, "serial", torch.zeros(2, 1, 28, 28)))
    assert "a rank sends nothing" in text


class Checkpointed(nn.Module):
    """Asks autograd to compute its layers again."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)
        return made


def _checkpointed(plan: str, reentrant: bool) -> str:
    net = nn.Sequential(nn.Conv2d(3, 3, 3), Checkpointed(reentrant))
    return convoy.explain(convoy.parallelize(net, plan, torch.zeros(2, 3, 8, 8)))


def test_activation_checkpointing_is_named() -> None:
    for reentrant in (False, True):
        for text in run_ranks(_checkpointed, 2, "filter=2", reentrant):
            assert "the backward pass computes no layer again: that would free nothing" in text
        assert "computes" not in run_ranks(_checkpointed, 1, "serial", reentrant)[0]


def _uneven(kind: str) -> tuple[str, str]:
    net: nn.Module = coupled(UNSEEN["choice"])() if kind == "uncaptured" else nn.Sequential(nn.Conv2d(3, 8, 3))
    net = convoy.parallelize(net, "sample=3", torch.zeros(2, 3, 8, 8))
    return convoy.explain(net), convoy.explain(net, samples=(6, 6, 4))


def test_uneven_shares() -> None:
    for kind in ("uncaptured", "one program"):
        for even, uneven in run_ranks(_uneven, 3, kind):
            assert "6 samples (2 + 2 + 2), 3 ranks" in even and "16 samples (6 + 6 + 4), 3 ranks" in uneven
            assert kind == "uncaptured" or even.splitlines()[-1] != uneven.splitlines()[-1]
