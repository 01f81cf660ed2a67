"""What `forward` reads of Python's objects may change between passes: attributes, hooks, modes, bare layers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.errors import ConvoyError
from ranks import run_ranks

SAMPLES = 6
IMAGES = torch.randn(4, SAMPLES, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(4, (4, SAMPLES), generator=torch.Generator().manual_seed(2))
PLANS = ["sample=2", "filter=2", "stage=2"]
Act = Callable[[Any, int], object]
"""What happens to a network before the update of a number."""


@dataclass
class Options:
    scale: float = 1.0
    powers: list[float] = field(default_factory=lambda: [1.0, 2.0])


class Net(nn.Module):
    offset = 0.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.bn, self.act = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.LeakyReLU(0.1)
        self.b, self.extra = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 1)
        self.out = nn.Linear(6, 4)
        self.temperature, self.branch, self.options = 1.0, False, Options()
        self.mask, self.note = torch.ones(6, 1, 1), 0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn(self.a(x)))
        x = self.b(x) * self.mask * self.options.scale + x ** self.options.powers[1] + self.offset
        if self.branch:
            x = x + self.extra(x)
        return self.out(x.mean((2, 3))) / self.temperature


class Frozen(Net):
    """Its batch norm stays in evaluation, as in detectors, and `train` freezes it."""

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.bn.eval()
        self.bn.weight.requires_grad_(False)
        return self


def trained(net: Any, act: Act, plan: str = "", mine: slice = slice(None)) -> dict[str, Tensor]:
    """Outputs of the last of four updates, its gradients, and the state after it."""
    weights = None
    for number, (images, labels) in enumerate(zip(IMAGES, LABELS, strict=True)):
        act(net, number)
        weights = weights or [p for p in net.parameters() if p.requires_grad]
        net.zero_grad()
        outputs = net(images[mine])
        F.cross_entropy(outputs, labels[mine]).backward()
        own = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        named = convoy.gradients(net) if plan else own
        gradients = {f"gradient of {name}": gradient.clone() for name, gradient in named.items()}
        with torch.no_grad():
            for parameter in weights:
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    Net.offset = 0.0
    state = convoy.state_dict(net) if plan else net.state_dict()
    return {"outputs": outputs.detach(), **gradients, **{name: x.clone() for name, x in state.items()}}


def parallelized(net: nn.Module, plan: str) -> tuple[nn.Module, slice]:
    net = convoy.parallelize(net, plan, IMAGES[0, : SAMPLES // 2 if plan == "sample=2" else SAMPLES], seed=3)
    return net, convoy.local_samples(net, SAMPLES)


def later(change: Callable[[Any], object], back: Callable[[Any], object] = lambda net: None) -> Act:
    """Something changes after two updates, and back after another; besides, what nobody reads always does."""
    acts = {2: change, 3: back}
    return lambda net, number: (setattr(net, "note", number), acts.get(number, lambda net: None)(net))


def at_first(mode: Callable[[Any], object]) -> Act:
    return lambda net, number: mode(net) if number == 0 else None


CHANGES: dict[str, Act] = {
    "eps": later(lambda net: setattr(net.bn, "eps", 0.1)),
    "value": later(lambda net: setattr(net, "temperature", 0.5), lambda net: setattr(net, "temperature", 1.0)),
    "branch": later(lambda net: setattr(net, "branch", True)),
    "object": later(lambda net: setattr(net.options, "scale", 0.5)),
    "tensor in place": later(lambda net: net.mask[:3].zero_()),
    "hook": later(lambda net: net.b.register_forward_hook(lambda layer, inputs, output: output.sin() * 3)),
    "forward of a layer": later(lambda net: setattr(net.act, "forward", torch.tanh)),
    "mode": later(lambda net: net.bn.eval()),
    "class": later(lambda net: setattr(type(net), "offset", 0.5)),
}
MODES: dict[str, Act] = {
    "as built": at_first(lambda net: None),
    "train": at_first(lambda net: net.train()),
    "evaluation and back": at_first(lambda net: net.eval().train()),
    "a layer in training": at_first(lambda net: net.eval().bn.train()),
}


def distances(plan: str) -> dict[str, float]:
    """How far training with each change, and in each mode, is from that of the plain network."""
    found = {}
    for name, act in (CHANGES | MODES).items():
        if (name, plan) == ("branch", "stage=2"):
            continue
        kind = Net if name in CHANGES else Frozen
        net, mine = parallelized(kind(), plan)
        want, got = trained(kind(), act), trained(net, act, plan, mine)
        assert got.keys() == want.keys(), (name, set(got) ^ set(want))
        want["outputs"] = want["outputs"][mine]
        found[name] = max((got[key] - x).abs().max().item() for key, x in want.items())
    return found


@pytest.mark.parametrize("plan", [pytest.param(p, marks=pytest.mark.slow) if p == "stage=2" else p for p in PLANS])
def test_changes_after_parallelize_and_modes_are_those_of_the_plain_network(plan: str) -> None:
    for found in run_ranks(distances, 2, plan, timeout=120):
        assert max(found.values()) < 1e-12, {name: off for name, off in found.items() if off > 1e-12}


SEEN: list[Tensor] = []


class Keeps(nn.Module):
    """Keeps what it computes, or has a hook that does."""

    def __init__(self, by_hook: bool) -> None:
        super().__init__()
        self.a, self.by_hook = nn.Conv2d(3, 4, 3).double(), by_hook
        if by_hook:
            self.a.register_forward_hook(lambda layer, inputs, output: SEEN.append(output))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        if not self.by_hook:
            self.last = y
        return y


def refused() -> None:
    for by_hook, where in ((False, "in last"), (True, r"\(a\)")):
        net = Keeps(by_hook)
        with pytest.raises(ConvoyError, match=f"a tensor of its forward pass {where}.*: return it from forward"):
            convoy.parallelize(net, "sample=2", IMAGES[0, :3])
        assert not SEEN and not hasattr(net, "last")


def test_what_would_not_be_there_after_a_pass_is_refused_but_on_one_device() -> None:
    run_ranks(refused, 2)
    net = convoy.parallelize(Keeps(True), "serial", IMAGES[0])
    assert not SEEN
    assert net(IMAGES[0]) is SEEN[-1]
