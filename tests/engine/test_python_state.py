"""What `forward` reads of Python's objects may change between passes: attributes, hooks, modes, layers without weights."""

import types
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from own_loops import rank
from torch import nn

import convoy
from convoy.errors import ConvoyError
from ranks import run_ranks

SAMPLES = 6
IMAGES = torch.randn(4, SAMPLES, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(4, (4, SAMPLES), generator=torch.Generator().manual_seed(2))


@dataclass
class Options:
    scale: float = 1.0
    powers: list = field(default_factory=lambda: [1.0, 2.0])


class Scale:
    """An object whose method is a hook."""

    def __init__(self):
        self.by = 1.0

    def hook(self, layer, inputs, output):
        return output * self.by


class Net(nn.Module):
    offset = 0.0

    def __init__(self, dropout=False):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Conv2d(3, 6, 3, padding=1)
        self.bn = nn.BatchNorm2d(6)
        self.act = nn.LeakyReLU(0.1)
        self.b = nn.Conv2d(6, 6, 3, padding=1)
        self.extra = nn.Conv2d(6, 6, 1)
        self.drop = nn.Dropout(0.0) if dropout else nn.Identity()
        self.out = nn.Linear(6, 4)
        self.temperature, self.branch, self.options = 1.0, False, Options()
        self.mask, self.scale, self.note = torch.ones(6, 1, 1), Scale(), 0
        self.act.register_forward_hook(self.scale.hook)
        self.double()

    def forward(self, x):
        x = self.act(self.bn(self.a(x)))
        x = self.b(x) * self.mask * self.options.scale + x ** self.options.powers[1] + self.offset
        if self.branch:
            x = x + self.extra(x)
        return self.out(self.drop(x).mean((2, 3))) / self.temperature


def _shift(layer, inputs, output):
    return output.sin() * 3


def _of_class(net):
    type(net).offset = 0.5


CHANGES = {
    "momentum": lambda net: setattr(net.bn, "momentum", 0.5),
    "eps": lambda net: setattr(net.bn, "eps", 0.1),
    "slope": lambda net: setattr(net.act, "negative_slope", 0.9),
    "stride": lambda net: setattr(net.a, "stride", (2, 2)) or setattr(net.b, "padding", (1, 1)),
    "dilation": lambda net: setattr(net.b, "dilation", (2, 2)) or setattr(net.b, "padding", (2, 2)),
    "value": lambda net: setattr(net, "temperature", 0.5),
    "branch": lambda net: setattr(net, "branch", True),
    "object": lambda net: setattr(net.options, "scale", 0.5),
    "list in an object": lambda net: net.options.powers.__setitem__(1, 1.0),
    "tensor in place": lambda net: net.mask[:3].zero_(),
    "tensor replaced": lambda net: setattr(net, "mask", torch.arange(6.0, dtype=torch.float64)[:, None, None]),
    "hook": lambda net: net.b.register_forward_hook(_shift),
    "hook taken away": lambda net: net.act._forward_hooks.clear(),
    "pre-hook": lambda net: net.b.register_forward_pre_hook(lambda layer, inputs: (inputs[0] * 3,)),
    "object of a hook": lambda net: setattr(net.scale, "by", 2.0),
    "forward of a layer": lambda net: setattr(net.act, "forward", torch.tanh),
    "layer without weights": lambda net: setattr(net, "act", nn.Tanh()),
    "mode": lambda net: net.bn.eval(),
    "class": _of_class,
}


def _trained(net, plan, change):
    """Gradients, state and outputs of updates, after the second of which something changes, and back after the third
    where it is a value."""
    mine = slice(None) if plan is None else convoy.local_samples(net, SAMPLES)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for number, (images, labels) in enumerate(zip(IMAGES, LABELS, strict=True)):
        if number == 2:
            CHANGES[change](net)
        if number == 3 and change == "value":
            net.temperature = 1.0
        net.note = number  # nobody reads it
        optimizer.zero_grad()
        F.cross_entropy(net(images[mine]), labels[mine]).backward()
        gradients = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
        gradients = gradients if plan is None else convoy.gradients(net)
        optimizer.step()
    Net.offset = 0.0
    state = net.state_dict() if plan is None else convoy.state_dict(net)
    return {**{f"gradient of {name}": x for name, x in gradients.items()}, **{n: x.clone() for n, x in state.items()}}


def _distances(plan, changes):
    found = {}
    for change in changes:
        want = _trained(Net(), None, change)
        net = convoy.parallelize(Net(), plan, IMAGES[0, : SAMPLES // 2 if plan.startswith("sample") else SAMPLES])
        got = _trained(net, plan, change)
        assert got.keys() == want.keys(), (change, set(got) ^ set(want))
        found[change] = max((got[name] - x).abs().max().item() for name, x in want.items())
    return found


@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "stage=2"])
def test_changes_after_parallelize_are_seen(plan):
    for found in run_ranks(_distances, 2, plan, list(CHANGES)):
        assert max(found.values()) < 1e-12, {name: off for name, off in found.items() if off > 1e-12}
