"""Networks built within `convoy.deferred()`: parallelize makes of them what it makes of plain ones, part by part."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy import models
from convoy.engine.network import network_of
from convoy.engine.parallelize import own_state
from convoy.graph import deferred as recorder
from convoy.graph.deferred import Deferred
from ranks import run_ranks

EXAMPLE = torch.zeros(2, 3, 32, 32)


def build(name: str, as_deferred: bool) -> nn.Module:
    if not as_deferred:
        return models.create(name)
    with convoy.deferred():
        return models.create(name)


def state_and_loss(name: str, plan: str, as_deferred: bool, own_seed: bool = False) -> tuple[Any, ...]:
    """This rank's part at the start, the gradients of a batch, and torch's random state after `parallelize`."""
    torch.manual_seed(3 + own_seed * int(os.environ["RANK"]))
    model = build(name, as_deferred)
    net = convoy.parallelize(model, plan, EXAMPLE)
    start = {key: tensor.detach().clone() for key, tensor in own_state(net).items()}
    assert not any(isinstance(tensor, Deferred) for tensor in start.values())
    after = torch.get_rng_state()
    torch.manual_seed(0)
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    mine = convoy.local_samples(net, 4)
    out = net(images[mine])
    F.cross_entropy(out[0] if isinstance(out, tuple) else out, labels[mine]).backward()
    return start, convoy.gradients(net), after


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(
        torch.equal(tensor, other[name]) and tensor.stride() == other[name].stride() for name, tensor in one.items()
    )


def both(name: str, plan: str, own_seed: bool = False) -> tuple[bool, bool, bool]:
    """Whether parts, gradients and random numbers are those of a plain network."""
    plain, lean = (state_and_loss(name, plan, as_deferred, own_seed) for as_deferred in (False, True))
    return same(plain[0], lean[0]), same(plain[1], lean[1]), torch.equal(plain[2], lean[2])


PLANS = [
    "filter=2",
    "stage=2",
    *(pytest.param(f"{axis}=2", marks=pytest.mark.slow) for axis in ("sample", "owt", "channel", "height")),
]


@pytest.mark.parametrize("plan", PLANS)
def test_parts_are_those_of_a_plain_network(plan: str) -> None:
    assert run_ranks(both, 2, "resnet18-cifar", plan) == [(True, True, True)] * 2


def test_rank_0_counts_where_seeds_differ() -> None:
    assert all(parts for parts, *_ in run_ranks(both, 2, "resnet18-cifar", "filter=2", True))


def made(plan: str, own_seed: bool) -> int:
    """How many tensors this rank makes."""
    torch.manual_seed(own_seed * int(os.environ["RANK"]))
    with convoy.deferred():
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 30 * 30, 4))
    with mock.patch.object(recorder, "replay", side_effect=recorder.replay) as replay:
        convoy.parallelize(model, plan, EXAMPLE)
    return replay.call_count


def test_ranks_make_their_own_where_they_would_make_the_same() -> None:
    assert run_ranks(made, 2, "sample=2", False) == [4, 4]
    assert run_ranks(made, 2, "sample=2", True) == [4, 0]  # rank 0 sends its own
    assert run_ranks(made, 2, "stage=2", False) == [2, 2]  # those of a stage alone


class Asking(nn.Module):
    """Its forward pass asks for a number, so that it runs layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 10)
        self.scale = torch.linspace(1, 2, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean((2, 3)) * self.scale
        return self.fc(x if x.sum().item() > 1e9 else x + 1)


def asking(as_deferred: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    if as_deferred:
        with convoy.deferred():
            model = Asking()
    else:
        model = Asking()
    net = convoy.parallelize(model, "filter=2", EXAMPLE)
    assert network_of(net).captured.startswith("layer by layer")
    F.cross_entropy(net(torch.ones(4, 3, 32, 32)), torch.arange(4)).backward()
    return {**convoy.state_dict(net), **{f"{name} gradient": g for name, g in convoy.gradients(net).items()}}


def test_a_network_that_cannot_be_captured_is_built_whole() -> None:
    assert all(same(*pair) for pair in zip(run_ranks(asking, 2, True), run_ranks(asking, 2, False), strict=True))


WHOLE_MB = (3072 + 20 * 2000) * 2000 * 4 / 2**20
PEAK = r"""
import contextlib, re, sys
from pathlib import Path
import torch
from torch import nn
import convoy

def build(width):
    layers = [nn.Linear(width, width, bias=False) for _ in range(20)]
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, width, bias=False), *layers)

def peak_mb():
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

example = torch.zeros(2, 3, 32, 32)
convoy.parallelize(build(64), sys.argv[2], example)
before = peak_mb()
with convoy.deferred() if sys.argv[1] != "plain" else contextlib.nullcontext():
    model = build(2000)
net = convoy.parallelize(model, sys.argv[2], example)
if sys.argv[1] == "load":
    convoy.load(sys.argv[3], net)
print(peak_mb() - before)
"""


def peak_mb(how: str, *given: str) -> float:
    """What these weights add to the peak of rank 1 of two under a plan."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PEAK, how, *given],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return float(said[1].splitlines()[-1])


@pytest.mark.slow
def test_no_rank_holds_the_whole() -> None:
    assert peak_mb("deferred", "stage=2") < WHOLE_MB / 2 + 75


@pytest.mark.slow
def test_no_rank_holds_a_whole_checkpoint(tmp_path: Path) -> None:
    layers = [nn.Linear(2000, 2000, bias=False) for _ in range(20)]
    plain = nn.Sequential(nn.Flatten(), nn.Linear(3072, 2000, bias=False), *layers)
    convoy.save(tmp_path / "saved", convoy.parallelize(plain, "serial", EXAMPLE))
    assert peak_mb("load", "filter=2", str(tmp_path / "saved")) < WHOLE_MB / 2 + 75


@pytest.mark.slow
def test_a_plain_network_is_whole_on_every_rank() -> None:
    assert peak_mb("plain", "stage=2") > WHOLE_MB - 5
