"""What is said of a parallelized network: how it was captured, which layers fell back, what is sent."""

from typing import Any

import torch
from odd_nets import UNSEEN, coupled
from torch import nn

import convoy
from plans.made_graph import Does
from ranks import run_ranks

PICTURES = torch.zeros(2, 3, 8, 8)
STRANGE = Does(lambda x: x * torch.linalg.svdvals(x).unsqueeze(-1))
NETS: list[tuple[Any, Any, tuple[str, ...]]] = [
    (
        *(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), STRANGE, nn.Conv2d(8, 8, 3)), "filter=2"),
        ("no rule for linalg_svdvals: runs whole on every rank: 1\n",),
    ),
    (
        *(coupled(UNSEEN["choice"]), {"mesh": {"gpu": 2}, "layers": {"conv": {"gpu": "filter"}}}),
        ("as it asks for the numbers in a tensor", "every rank runs all layers on the whole batch"),
    ),
    (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)),
        {"mesh": {"stage": 2}, "stages": ["3"]},
        (
            "plan stage=2; stages begin at 3\n",
            "go through the stages in 2 parts, schedule gpipe: stages of equal work wait 33 % of the time",
            "a rank of stage 2 holds most in all: 11.6 kB of 12.5 kB of parameters, 11.6 kB of gradients, 2.3 kB",
        ),
    ),
    (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 1, 3)), "filter=2", ("channel is not divided: 1\n",)),
    (lambda: nn.Conv2d(3, 8, 3), "sample=2", ("4 samples (2 + 2), 2 ranks",)),
]


def explained(number: int) -> str:
    make, plan, _ = NETS[number]
    net = convoy.parallelize(make(), plan, PICTURES)
    assert plan != "sample=2" or "10 samples (6 + 4), 2 ranks" in convoy.explain(net, samples=(6, 4))
    return convoy.explain(net)


def test_a_network_is_explained_alike_on_every_rank() -> None:
    for number, (_, _, sentences) in enumerate(NETS):
        first, second = run_ranks(explained, 2, number)
        assert first == second and all(words in first for words in sentences), first
