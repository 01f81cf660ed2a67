"""What is said of a parallelized network: how it was captured, which layers fell back, what is sent."""

from typing import Any

import pytest
import torch
from odd_nets import UNSEEN, coupled
from torch import Tensor, nn

import convoy
from convoy import models
from convoy.errors import ConvoyError
from ranks import run_ranks


class Strange(nn.Module):
    """Calls something that nobody has a rule for."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linalg.svdvals(x).unsqueeze(-1)


def between(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), layer, nn.Conv2d(8, 8, 3))


PICTURES = torch.zeros(2, 3, 8, 8)
NETS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "alexnet": (
        lambda: models.create("alexnet"),
        "owt=2",
        (
            "plan owt=2\ntraining, 32 samples (16 + 16), 2 ranks, captured as one program\n\nlayer ",
            "classifier.1  linear  filter    features over owt  move over owt        590 kB    590 kB",
            "a rank sends 1.15 MB in the forward pass, 1.15 MB in the backward pass, 9.88 MB for gradients",
        ),
    ),
    "no rule": (lambda: between(Strange()), "filter=2", ("no rule for linalg_svdvals: runs whole on every rank: 1\n",)),
    "uncaptured": (
        *(coupled(UNSEEN["choice"]), {"mesh": {"gpu": 2}, "layers": {"conv": {"gpu": "filter"}}}),
        ("as it asks for the numbers in a tensor", "every rank runs all layers on the whole batch"),
    ),
    "stages": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)),
        {"mesh": {"stage": 2}, "stages": ["3"]},
        (
            "plan stage=2; stages begin at 3\n",
            "2      3          1      2                     2.3 kB    2.3 kB     11.6 kB       2.3 kB",
            "go through the stages in 2 parts, schedule gpipe: stages of equal work wait 33 % of the time",
            "a rank of stage 2 holds most in all: 11.6 kB of 12.5 kB of parameters, 11.6 kB of gradients, 2.3 kB",
        ),
    ),
}


def explained(kind: str) -> tuple[str, str]:
    """In training and in evaluation mode."""
    make, plan, _ = NETS[kind]
    example = torch.zeros(16, 3, 224, 224) if kind == "alexnet" else PICTURES
    net = convoy.parallelize(make(), plan, example)
    training, evaluation = convoy.explain(net), convoy.explain(net.eval())
    if kind == "stages":
        convoy.forward_backward(net.train(), example, example, lambda y, x: y.mean(), schedule="zero-bubble")
        text = convoy.explain(net)
        assert "2 parts, schedule zero-bubble: stages of equal work wait 14 % of the time" in text, text
        net.eval()(example)
        assert convoy.explain(net.train()) == text
        net(example)
        assert convoy.explain(net) == training
    return training, evaluation


def test_a_network_is_explained_alike_on_every_rank() -> None:
    for kind, (_, _, said) in NETS.items():
        (training, evaluation), second = run_ranks(explained, 2, kind)
        assert (training, evaluation) == second
        assert all(words in training for words in said), training
        assert "in the backward pass" not in evaluation


def uneven() -> None:
    for net in (coupled(UNSEEN["choice"])(), nn.Conv2d(3, 8, 3)):
        convoy.parallelize(net, "sample=3", PICTURES)
        assert "6 samples (2 + 2 + 2), 3 ranks" in convoy.explain(net)
        assert "16 samples (6 + 6 + 4), 3 ranks" in convoy.explain(net, samples=(6, 6, 4))


def test_uneven_shares_and_one_device() -> None:
    run_ranks(uneven, 3)
    net = models.create("lenet")
    with pytest.raises(ConvoyError, match="not parallelized"):
        convoy.explain(net)
    assert "a rank sends nothing" in convoy.explain(convoy.parallelize(net, "serial", torch.zeros(2, 1, 28, 28)))
