"""Activations that are computed again give the same bits: outputs, gradients and buffers are those without it."""

import contextlib
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from own_loops import world_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import convoy
from convoy.engine.network import network_of
from convoy.engine.program import Stretch
from convoy.engine.stages import StagedNetwork
from convoy.ops import context
from ranks import run_ranks


class Drops(nn.Module):
    """Dropout behind batch norm and a residual sum, three times; the second asks for recomputation itself, or not."""

    def __init__(self, asks: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.stem, self.asks, self.reentrant = nn.Conv2d(3, 6, 3, padding=1), asks, reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.4), nn.Conv2d(6, 6, 3, padding=1))
            for _ in range(3)
        )
        self.head = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            asks = self.asks and number == 1
            x = torch.relu(x + (checkpoint(block, x, use_reentrant=self.reentrant) if asks else block(x)))
        return self.head(x.mean((2, 3)))


NETS = {"drops": Drops, "asking": lambda: Drops(True), "asking reentrant": lambda: Drops(True, True)}


def made(name: str, plan: str, recompute: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    example = torch.zeros(2, 3, 16, 16, dtype=torch.float64)
    return convoy.parallelize(NETS[name]().double(), plan, example, seed=5, recompute=recompute, **options)


def num_stretches(net: nn.Module) -> int:
    """How many stretches the programs of a network have that have run."""
    programs = network_of(net)._programs.values()
    return sum(isinstance(one.run, Stretch) for _, program in programs for one in program._program)


def train(
    net: nn.Module, in_flight: int = 1, schedule: str = "loop", sizes: tuple[int, ...] = (6, 7)
) -> dict[str, Tensor]:
    """All that comes of two updates; of each batch `in_flight` forward passes are run before their backward passes."""
    network, found = network_of(net), {}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for number, size in enumerate(sizes):
        optimizer.zero_grad()
        losses = []
        for piece in range(in_flight):
            x = torch.randn(size, 3, 16, 16, dtype=torch.float64, generator=generator)
            y = torch.randint(0, 10, (size,), generator=generator)
            mine = convoy.local_samples(net, size)
            if network.context.batch_norm == "microbatch" and not isinstance(network, StagedNetwork):
                halves = (-(-size // 2), size // 2)
                network.samples = (size,) if network.num_sample_ranks == 1 else halves
                network.context.enter(number, piece * size, halves, x.device)
            own = x[mine].clone().requires_grad_()
            if schedule == "loop":
                losses.append((F.cross_entropy(net(own), y[mine]), own))
            else:
                losses.append((convoy.forward_backward(net, own, y[mine], F.cross_entropy, schedule=schedule), own))
        for piece, (loss, own) in enumerate(losses):
            with nullcontext() if piece == in_flight - 1 else convoy.accumulate(net):
                if loss.requires_grad:
                    loss.backward()
            found |= {f"loss {number} {piece}": loss.detach(), f"input {number} {piece}": own.grad}
        network.context.statistics.fold(network.groups)
        found |= {f"gradient {number} {name}": g for name, g in convoy.gradients(net).items()}
        optimizer.step()
    return found | {f"state {name}": tensor for name, tensor in convoy.state_dict(net).items()}


def unlike(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    assert got.keys() == want.keys()
    return [key for key in want if not torch.equal(got[key].nan_to_num(), want[key].nan_to_num())]


def compared(plan: str, batch_norm: str, options: dict[str, Any]) -> list[str]:
    """What differs with recomputation and without it."""
    how = {key: options[key] for key in ("in_flight", "schedule", "sizes") if key in options}
    made_with = {"batch_norm": batch_norm} | {key: options[key] for key in ("microbatches",) if key in options}
    with patch("convoy.ops.batch_norm.at_once", lambda x: options.get("as on a GPU", x.is_cuda)):
        want = train(made("drops", plan, False, **made_with), **how)
        net = made("drops", plan, options.get("recompute", True), **made_with)
        with SABOTAGES[options.get("sabotage", "")]():
            different = unlike(train(net, **how), want)
        assert num_stretches(net)
    return different


@contextlib.contextmanager
def _again_as_now(self):
    """Without the context of the pass."""
    with patch.object(self.context, "recording", False):
        yield


@contextlib.contextmanager
def _again_recording(self):
    with _again(self):
        self.context.recording = True
        yield


_again = context.Rerun.again
SABOTAGES = {
    "": nullcontext,
    "context": lambda: patch.object(context.Rerun, "again", _again_as_now),
    "recording": lambda: patch.object(context.Rerun, "again", _again_recording),
}
THREE, SOME = {"microbatches": 3, "sizes": (7, 6, 7)}, ["blocks.0.*", "blocks.2.*"]


@pytest.mark.parametrize(
    ("plan", "batch_norm", "options"),
    [
        ("height=2", "sync", {}),
        ("filter=2", "local", {}),
        ("sample=2", "microbatch", {"in_flight": 3}),
        ("serial", "microbatch", {"as on a GPU": True}),
        ("sample=2", "sync", {"as on a GPU": True}),
        ("stage=2", "microbatch", THREE | {"schedule": "1f1b", "recompute": SOME}),
    ],
)
def test_the_bits_are_the_same(plan: str, batch_norm: str, options: dict[str, Any]) -> None:
    assert not any(run_ranks(compared, world_of(plan), plan, batch_norm, options, timeout=120))


def test_a_pass_in_anothers_context_and_statistics_that_are_noted_twice_are_noticed() -> None:
    (different,) = run_ranks(compared, 1, "serial", "microbatch", {"in_flight": 3, "sabotage": "context"})
    assert any(key.startswith("gradient") for key in different)
    (different,) = run_ranks(compared, 1, "serial", "sync", {"sabotage": "recording"})
    assert all(any(word in key for key in different) for word in ("running_mean", "num_batches_tracked"))


def asking() -> None:
    plain = made("drops", "sample=2", False)
    want = train(plain)
    assert not num_stretches(plain)
    for name in ("asking", "asking reentrant"):
        net = made(name, "sample=2", False)
        assert not unlike(train(net), want)
        assert num_stretches(net) == 2  # one for each size of the batch
        calls = network_of(net).example_placement(True).graph.calls
        assert {call.layer for call in calls if call.recomputed} == {f"blocks.1.{layer}" for layer in range(4)}
        assert "the backward pass computes 4 of 14 layers again, in one stretch" in convoy.explain(net)


def test_a_network_may_ask_for_it_itself() -> None:
    run_ranks(asking, 2)
