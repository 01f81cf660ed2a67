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
from convoy.ops import batch_norm as batch_norms
from convoy.ops import context, shared_batch_norm
from ranks import run_ranks
from small_nets import SMALL_NETS


class Drops(nn.Module):
    """Dropout behind batch norm and a residual sum, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.4), nn.Conv2d(6, 6, 3, padding=1))
            for _ in range(3)
        )
        self.head = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))


NETS = {**SMALL_NETS, "drops": Drops}


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


def compare(
    plan: str,
    names: tuple[str, ...],
    batch_norm: str,
    recompute: Any = True,
    sabotage: str = "",
    microbatches: int | None = None,
    **how: Any,
) -> Any:
    """What differs, by network, and how many stretches were run."""
    different, count = {}, {}
    options = {"batch_norm": batch_norm} | ({} if microbatches is None else {"microbatches": microbatches})
    for name in names:
        want = train(made(name, plan, False, **options), **how)
        net = made(name, plan, recompute, **options)
        with SABOTAGES[sabotage]():
            got = train(net, **how)
        assert got.keys() == want.keys()
        different[name] = [key for key in want if not torch.equal(got[key].nan_to_num(), want[key].nan_to_num())]
        count[name] = num_stretches(net)
    return different, count


def compared(plan: str, batch_norm: str, options: dict[str, Any]) -> Any:
    return compare(plan, options.pop("names", ("drops",)), batch_norm, **options)


STAGED: list[tuple[str, str, dict[str, Any]]] = [
    *(("stage=2", "microbatch", {"microbatches": 3, "schedule": one, "sizes": (7, 6, 7)}) for one in ("loop", "1f1b")),
    (
        "stage=2",
        "microbatch",
        {"microbatches": 3, "schedule": "gpipe", "recompute": ["blocks.0.*", "blocks.2.*"], "sizes": (7, 6, 7)},
    ),
    ("stage=2,sample=2", "sync", {"microbatches": 1, "schedule": "1f1b"}),
]
MANY = {"names": (*SMALL_NETS, "drops")}


@pytest.mark.parametrize(
    ("plan", "batch_norm", "options"),
    [
        ("serial", "microbatch", {}),
        ("sample=2", "sync", {}),
        ("height=2", "sync", {}),
        ("filter=2", "local", {}),
        ("serial", "sync", {"in_flight": 3}),
        ("sample=2", "microbatch", {"in_flight": 3}),
        *STAGED,
        *(
            pytest.param(plan, batch_norm, MANY, marks=pytest.mark.slow)
            for plan, batch_norm in (("serial", "sync"), ("sample=2,filter=2", "microbatch"), ("channel=2", "sync"))
        ),
    ],
)
def test_the_bits_are_the_same(plan: str, batch_norm: str, options: dict[str, Any]) -> None:
    for different, count in run_ranks(compared, world_of(plan), plan, batch_norm, options, timeout=120):
        assert not any(different.values()), different
        assert all(count.values()), count


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


def test_what_is_noticed() -> None:
    """The negative controls: a pass in another's context, and statistics that are noted twice."""
    context = {"in_flight": 3, "sabotage": "context"}
    different, _ = run_ranks(compared, 1, "serial", "microbatch", context)[0]
    assert any(key.startswith("gradient") for key in different["drops"])
    assert not any(key.startswith("loss 0") for key in different["drops"])
    staged = {"microbatches": 3, "schedule": "1f1b", "sizes": (6, 6)}
    (first, _), (last, _) = run_ranks(compared, 2, "stage=2", "microbatch", staged | {"sabotage": "context"})
    assert any(key.startswith("gradient 0") for key in first["drops"])
    assert "loss 0 0" not in last["drops"]
    for plan, batch_norm, options in [
        ("serial", "sync", {}),
        ("serial", "microbatch", {}),
        ("stage=2", "microbatch", staged),
    ]:
        for different, _ in run_ranks(compared, world_of(plan), plan, batch_norm, options | {"sabotage": "recording"}):
            assert any("running_mean" in key for key in different["drops"]), different
            assert any("num_batches_tracked" in key for key in different["drops"]), different


def as_on_a_gpu(plan: str, batch_norm: str) -> Any:
    """`compare` with the batch norms of GPUs, which do the ReLU that follows, by torch's operations on the CPU."""
    with patch.object(batch_norms, "at_once", always), patch.object(shared_batch_norm, "at_once", always):
        return compare(plan, ("drops",), batch_norm)


def always(x: Tensor) -> bool:
    return True


def test_kernels_of_gpus() -> None:
    for plan, batch_norm in [("serial", "microbatch"), ("sample=2", "sync")]:
        for different, count in run_ranks(as_on_a_gpu, world_of(plan), plan, batch_norm):
            assert not different["drops"] and count["drops"]


class Asking(nn.Module):
    """Asks for it itself, for the second of three blocks."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.drops, self.reentrant = Drops(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.drops.stem(x)
        for number, block in enumerate(self.drops.blocks):
            x = torch.relu(x + (checkpoint(block, x, use_reentrant=self.reentrant) if number == 1 else block(x)))
        return self.drops.head(x.mean((2, 3)))


NETS |= {"asking": lambda: Asking(False), "asking reentrant": lambda: Asking(True)}


def _asking(plan: str) -> None:
    found = {}
    for name in ("asking", "asking reentrant"):
        net = made(name, plan, False)
        found[name] = train(net)
        assert num_stretches(net) == 2  # one for each size of the batch
        placement = network_of(net).example_placement(True)
        assert {call.layer for call in placement.graph.calls if call.recomputed} == {
            f"drops.blocks.1.{layer}" for layer in range(4)
        }
        assert "the backward pass computes 4 of 14 layers again, in one stretch" in convoy.explain(net)
    with patch.object(Asking, "forward", _without):
        plain = made("asking", plan, False)
        want = train(plain)
        assert not num_stretches(plain)
    for got in found.values():
        assert all(torch.equal(got[key].nan_to_num(), want[key].nan_to_num()) for key in want)


def _without(self: Asking, x: Tensor) -> Tensor:
    x = self.drops.stem(x)
    for block in self.drops.blocks:
        x = torch.relu(x + block(x))
    return self.drops.head(x.mean((2, 3)))


def _changed_meanwhile() -> None:
    net = made("drops", "filter=2", True)
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    loss = net(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_network_may_ask_for_it_itself_and_an_input_that_is_changed_meanwhile_is_refused() -> None:
    run_ranks(_asking, 2, "sample=2")
    run_ranks(_changed_meanwhile, 2)


def test_some_layers_and_evaluation() -> None:
    net = made("drops", "serial", ["blocks.0.*", "blocks.2.*"])
    train(net)
    assert num_stretches(net) == 4
    x = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    plain = made("drops", "serial", False)
    convoy.load_state_dict(plain, convoy.state_dict(net))
    with torch.no_grad():
        assert torch.equal(net.eval()(x), plain.eval()(x))
    assert torch.equal(net(x), copy.deepcopy(net)(x))


def test_autocast() -> None:
    found = []
    for recompute in (False, True):
        net = made("drops", "serial", recompute).float()
        x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(3))
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(x).float().square().mean()
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in net.parameters())])
    assert all(map(torch.equal, *found))


def _compiled() -> list[float]:
    found, compile = [], torch.compile
    for recompute in (False, True):
        net = made("drops", "sample=2", recompute, compile=True)
        with patch.object(torch, "compile", lambda function, **_: compile(function, backend="aot_eager")):
            found.append(train(net))
        assert bool(num_stretches(net)) == recompute
    without, again = found
    return [(without[key] - again[key]).abs().nan_to_num().max().item() for key in without if without[key].numel()]


@pytest.mark.slow
def test_compiled() -> None:
    for errors in run_ranks(_compiled, 2, timeout=120):
        assert max(errors) < 1e-12
