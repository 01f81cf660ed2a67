"""Activations that are computed again give the same bits: outputs, gradients and buffers are those without it."""

import contextlib
import copy
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
from small_nets import SMALL_NETS


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


NETS: dict[str, Any] = {**SMALL_NETS, "drops": Drops}
NETS |= {"asking": lambda: Drops(True), "asking reentrant": lambda: Drops(True, True)}


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


def compared(plan: str, batch_norm: str, options: dict[str, Any]) -> tuple[list[str], int]:
    """What differs with recomputation and without it, and in how many stretches it was."""
    how = {key: options[key] for key in ("in_flight", "schedule", "sizes") if key in options}
    made_with = {"batch_norm": batch_norm} | {key: options[key] for key in ("microbatches",) if key in options}
    different, count = [], 0
    with patch("convoy.ops.normalization.at_once", lambda x: options.get("as on a GPU", x.is_cuda)):
        for name in options.get("names", ("drops",)):
            want = train(made(name, plan, False, **made_with), **how)
            net = made(name, plan, options.get("recompute", True), **made_with)
            with SABOTAGES[options.get("sabotage", "")]():
                different += unlike(train(net, **how), want)
            assert num_stretches(net)
            count += num_stretches(net)
    return different, count


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
MANY = {"names": (*SMALL_NETS, "drops")}


@pytest.mark.parametrize(
    ("plan", "batch_norm", "options"),
    [
        ("height=2", "sync", {}),
        ("filter=2", "local", {}),
        ("serial", "sync", {"in_flight": 3}),
        ("sample=2", "microbatch", {"in_flight": 3}),
        ("serial", "microbatch", {"as on a GPU": True}),
        ("sample=2", "sync", {"as on a GPU": True}),
        ("stage=2", "microbatch", THREE | {"schedule": "1f1b"}),
        ("stage=2", "microbatch", THREE | {"schedule": "gpipe", "recompute": SOME}),
        ("stage=2,sample=2", "sync", {"microbatches": 1, "schedule": "1f1b"}),
        pytest.param("sample=2,filter=2", "microbatch", MANY, marks=pytest.mark.slow),
        pytest.param("channel=2", "sync", MANY, marks=pytest.mark.slow),
    ],
)
def test_the_bits_are_the_same(plan: str, batch_norm: str, options: dict[str, Any]) -> None:
    for different, _ in run_ranks(compared, world_of(plan), plan, batch_norm, options, timeout=120):
        assert not different


def test_a_pass_in_anothers_context_and_statistics_that_are_noted_twice_are_noticed() -> None:
    different, _ = run_ranks(compared, 1, "serial", "microbatch", {"in_flight": 3, "sabotage": "context"})[0]
    assert any(key.startswith("gradient") for key in different)
    assert not any(key.startswith("loss 0") for key in different)
    staged = {"microbatches": 3, "schedule": "1f1b", "sizes": (6, 6)}
    (first, _), (last, _) = run_ranks(compared, 2, "stage=2", "microbatch", staged | {"sabotage": "context"})
    assert any(key.startswith("gradient 0") for key in first) and "loss 0 0" not in last
    for plan, batch_norm, options in [
        ("serial", "sync", {}),
        ("serial", "microbatch", {}),
        ("stage=2", "microbatch", staged),
    ]:
        for different, _ in run_ranks(compared, world_of(plan), plan, batch_norm, options | {"sabotage": "recording"}):
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


def changed_meanwhile() -> None:
    net = made("drops", "filter=2", True)
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    loss = net(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_network_may_ask_for_it_itself_and_an_input_that_is_changed_meanwhile_is_refused() -> None:
    run_ranks(asking, 2)
    run_ranks(changed_meanwhile, 2)


def test_some_layers_evaluation_and_autocast() -> None:
    net, plain = made("drops", "serial", SOME), made("drops", "serial", False)
    train(net)
    assert num_stretches(net) == 4
    x = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    convoy.load_state_dict(plain, convoy.state_dict(net))
    with torch.no_grad():
        assert torch.equal(net.eval()(x), plain.eval()(x))
    assert torch.equal(net(x), copy.deepcopy(net)(x))
    losses = []
    for each in (made("drops", "serial", recompute).float() for recompute in (False, True)):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(each(x.float()).float().square().mean())
        losses[-1].backward()
        losses += [p.grad for p in each.parameters()]
    assert all(map(torch.equal, losses[: len(losses) // 2], losses[len(losses) // 2 :]))


def compiled() -> float:
    found, compile = [], torch.compile
    for recompute in (False, ["blocks.1.*"]):
        net = made("drops", "sample=2", recompute, compile=True, batch_norm="local")
        with patch.object(torch, "compile", lambda function, **_: compile(function, backend="aot_eager")):
            found.append(train(net, sizes=(6,)))
        assert bool(num_stretches(net)) == bool(recompute)
    without, again = found
    return max((without[key] - again[key]).abs().nan_to_num().max().item() for key in without if without[key].numel())


@pytest.mark.slow
def test_compiled() -> None:
    assert max(run_ranks(compiled, 2, timeout=120)) < 1e-12
