"""What is said of a parallelized network: how it was captured, which layers fell back, what is sent."""

from typing import Any

import torch
from odd_nets import UNSEEN, coupled
from torch import Tensor, nn

import convoy
from ranks import run_ranks


class Strange(nn.Module):
    """Calls something that nobody has a rule for."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linalg.svdvals(x).unsqueeze(-1)


def between(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), layer, nn.Conv2d(8, 8, 3))


PICTURES = torch.zeros(2, 3, 8, 8)
NETS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
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
            "go through the stages in 2 parts, schedule gpipe: stages of equal work wait 33 % of the time",
            "a rank of stage 2 holds most in all: 11.6 kB of 12.5 kB of parameters, 11.6 kB of gradients, 2.3 kB",
        ),
    ),
}


def explained(kind: str) -> str:
    make, plan, _ = NETS[kind]
    return convoy.explain(convoy.parallelize(make(), plan, PICTURES))


def test_a_network_is_explained_alike_on_every_rank() -> None:
    for kind, (_, _, sentences) in NETS.items():
        first, second = run_ranks(explained, 2, kind)
        assert first == second and all(words in first for words in sentences), first


def uneven() -> None:
    net = convoy.parallelize(nn.Conv2d(3, 8, 3), "sample=3", PICTURES)
    assert "6 samples (2 + 2 + 2), 3 ranks" in convoy.explain(net)
    assert "16 samples (6 + 6 + 4), 3 ranks" in convoy.explain(net, samples=(6, 6, 4))


def test_uneven_shares() -> None:
    run_ranks(uneven, 3)
