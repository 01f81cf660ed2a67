"""What `forward` reads of Python's objects may change between passes: attributes, hooks, modes, bare layers."""

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.engine.network import network_of
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


class Scale:
    """An object whose method is a hook."""

    by = 1.0

    def hook(self, layer, inputs, output):
        return output * self.by


class Net(nn.Module):
    offset = 0.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.bn, self.act = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.LeakyReLU(0.1)
        self.b, self.extra = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 1)
        self.out = nn.Linear(6, 4)
        self.temperature, self.branch, self.options = 1.0, False, Options()
        self.mask, self.scale, self.note = torch.ones(6, 1, 1), Scale(), 0
        self.act.register_forward_hook(self.scale.hook)
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


class Changing(nn.Module):
    """Does something of its own in its forward pass."""

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.what, self.a, self.out = what, nn.Conv2d(3, 4, 3), nn.Linear(4, 4)
        self.calls, self.kept, self.tables = 0, None, {}
        self.table = None
        if what == "backward hook":
            self.out.register_full_backward_hook(lambda layer, inputs, outputs: (inputs[0] * 0.5,))
        if what == "gradient hook":
            self.out.weight.register_hook(lambda gradient: gradient * 2)
        if what == "forward of its own":
            self.forward = types.MethodType(lambda self, x: self.out(self.a(x).mean((2, 3))) * 2, self)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.what == "counter":
            self.calls += 1
            x = x * self.calls
        if self.what == "first pass":
            x = x if self.calls else x * 2
            self.calls = 1
        if self.what == "keeps":
            self.kept = x
        if self.what == "values":
            self.table = torch.arange(6.0) if self.table is None else self.table
            self.tables.setdefault(x.shape[1:], self.table + 1)
            x = x * x.shape[-2] + self.tables[x.shape[1:]]
        return self.out(x.mean((2, 3)))


def trained(net: Any, act: Act, plan: str = "", mine: slice = slice(None)) -> dict[str, Tensor]:
    """Outputs of the last of four updates, its gradients, and the state after it."""
    weights = None
    for number, (images, labels) in enumerate(zip(IMAGES, LABELS, strict=True)):
        act(net, number)
        weights = weights or [p for p in net.parameters() if p.requires_grad]
        net.zero_grad()
        outputs = net(images[mine])
        F.cross_entropy(outputs, labels[mine]).backward()
        gradients = (
            convoy.gradients(net) if plan else {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
        )
        gradients = {f"gradient of {name}": gradient.clone() for name, gradient in gradients.items()}
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
    "stride": later(lambda net: setattr(net.a, "stride", (2, 2))),
    "value": later(lambda net: setattr(net, "temperature", 0.5), lambda net: setattr(net, "temperature", 1.0)),
    "branch": later(lambda net: setattr(net, "branch", True)),
    "object": later(lambda net: setattr(net.options, "scale", 0.5)),
    "tensor in place": later(lambda net: net.mask[:3].zero_()),
    "hook": later(lambda net: net.b.register_forward_hook(lambda layer, inputs, output: output.sin() * 3)),
    "object of a hook": later(lambda net: setattr(net.scale, "by", 2.0)),
    "forward of a layer": later(lambda net: setattr(net.act, "forward", torch.tanh)),
    "forward of the network": later(
        lambda net: setattr(net, "forward", lambda x: net.out(net.b(net.bn(net.a(x))).mean((2, 3))))
    ),
    "layer without weights": later(lambda net: setattr(net, "act", nn.Tanh())),
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


@pytest.mark.parametrize("plan", PLANS)
def test_changes_after_parallelize_and_modes_are_those_of_the_plain_network(plan: str) -> None:
    for found in run_ranks(distances, 2, plan, timeout=120):
        assert max(found.values()) < 1e-12, {name: off for name, off in found.items() if off > 1e-12}


def another_branch_and_a_copy() -> None:
    net, _ = parallelized(Net(), "stage=2")
    net.branch = True
    with pytest.raises(ConvoyError, match=r"extra\.(weight|bias) is used in another stage now than when"):
        net(IMAGES[0])
    twin, plain = copy.deepcopy(parallelized(Net(), "filter=2")[0]).eval(), Net().eval()
    for each in (twin, plain):
        each.forward = lambda x, net=each: net.out(net.b(net.a(x)).mean((2, 3)))
    with torch.no_grad():
        torch.testing.assert_close(twin(IMAGES[0]), plain(IMAGES[0]), rtol=0, atol=1e-12)


def test_another_branch_and_forward_of_a_copy() -> None:
    run_ranks(another_branch_and_a_copy, 2)


CAPTURED = ("values", "forward of its own")
UNCAPTURED = ("counter", "first pass", "backward hook")


def changing() -> None:
    for what in (*CAPTURED, *UNCAPTURED):
        net, mine = parallelized(Changing(what), "sample=2")
        want, got = trained(Changing(what), lambda *_: None), trained(net, lambda *_: None, "sample=2", mine)
        want["outputs"] = want["outputs"][mine]
        assert max((got[name] - x).abs().max().item() for name, x in want.items()) < 1e-12, what
        assert network_of(net).captured.startswith("whole on every rank, as ") == (what in UNCAPTURED)
        assert net.calls == {"counter": 4, "first pass": 1}.get(what, 0)


def test_what_forward_does_by_itself_is_done() -> None:
    run_ranks(changing, 2)


KEPT = {
    "keeps": "it keeps a tensor of its forward pass in kept.*: return it from forward",
    "hook": r"a hook or function keeps a tensor of its forward pass \(a\).*: return it from forward",
    "gradient hook": r"out\.weight has a gradient hook, which would see this rank's part",
}


def refused(what: str) -> None:
    net, seen = Changing(what), dict[str, Tensor]()
    if what == "hook":
        net.a.register_forward_hook(lambda layer, inputs, output: seen.__setitem__("a", output))
    with pytest.raises(ConvoyError, match=KEPT[what]):
        convoy.parallelize(net, "sample=2", IMAGES[0, :3])
    assert not seen and net.kept is None


def test_what_would_not_be_there_after_a_pass_is_refused_but_on_one_device() -> None:
    for what in KEPT:
        run_ranks(refused, 2, what)
    net, seen = Changing("keeps"), []
    net.a.register_forward_hook(lambda layer, inputs, output: seen.append(output))
    net = convoy.parallelize(net, "serial", IMAGES[0])
    assert not seen
    net(IMAGES[0])
    assert net.kept is seen[-1] and type(net.kept) is torch.Tensor
