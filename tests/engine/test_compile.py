"""Compiled programs give the same numbers; only what computes is compiled, and it really is."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from own_loops import world_of
from torch import Tensor, nn

import convoy
from convoy.engine import program
from convoy.engine.network import network_of
from ranks import run_ranks

IMAGES = torch.randn(6, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.last = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(32, 10))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = self.last((self.second(x) + x).relu())
        return y


def train(net: nn.Module) -> dict[str, Tensor]:
    """Losses and state of three updates."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    mine, engine, losses = convoy.local_samples(net, len(IMAGES)), network_of(net), {}
    for step in range(3):
        optimizer.zero_grad()
        if engine.context.batch_norm == "microbatch":
            engine.samples = (6,) if engine.num_sample_ranks == 1 else (3, 3)
            engine.context.enter(step, 0, (3, 3), IMAGES.device)
        loss = net(IMAGES[mine]).square().mean()
        loss.backward()
        optimizer.step()
        engine.context.statistics.fold(engine.groups)
        losses[f"loss {step}"] = loss.detach()
    return losses | convoy.state_dict(net)


def compare(plan: str, batch_norm: Any, sabotage: Callable[[Any], Any] = lambda module: module) -> list[int]:
    """How often torch has compiled each stretch; asserts that the numbers are the same."""
    made: list[int] = []
    compile = torch.compile

    def counting(function: Any, **options: Any) -> Any:
        made.append(0)
        number = len(made) - 1

        def backend(module: Any, inputs: Sequence[Tensor]) -> Any:
            made[number] += 1
            return sabotage(module)

        return compile(function, backend=backend, **options)

    with patch.object(torch, "compile", counting):
        got = train(convoy.parallelize(Net(), plan, IMAGES[:2], batch_norm=batch_norm, seed=1, compile=True))
    want = train(convoy.parallelize(Net(), plan, IMAGES[:2], batch_norm=batch_norm, seed=1))
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-10, atol=1e-12, msg=name)
    return made


@pytest.mark.parametrize(
    ("plan", "batch_norm", "num"),
    [
        ("sample=1", "microbatch", 2),
        ("sample=2", "microbatch", 2),  # before and after dropout
        ("sample=2", "sync", 4),  # and around each batch norm
        ("height=2", "sync", None),
    ],
)
def test_the_numbers_are_the_same(plan: str, batch_norm: str, num: int | None) -> None:
    for made in run_ranks(compare, 1 if plan == "sample=1" else world_of(plan), plan, batch_norm, timeout=120):
        assert made and all(graphs == 1 for graphs in made)
        assert num is None or len(made) == num


def slightly_off(module: Any) -> Any:
    return lambda *inputs: [output * (1 + 1e-9) for output in module(*inputs)]


def noticed() -> list[int]:
    with pytest.raises(AssertionError):
        compare("sample=2", "microbatch", slightly_off)
    with patch.object(program, "compiled", lambda instructions, *_: instructions):
        return compare("sample=2", "microbatch")


def test_other_numbers_and_what_is_not_compiled_would_be_noticed() -> None:
    assert run_ranks(noticed, 2, timeout=120) == [[], []]
