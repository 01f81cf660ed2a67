"""What `forward` reads of Python's objects may change between passes: attributes, hooks, modes, bare layers."""

import copy
import types
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
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
    "forward of the network": lambda net: setattr(
        net, "forward", lambda x: net.out(net.drop(net.b(net.bn(net.a(x)))).mean((2, 3)))
    ),
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


def _copied():
    twin = copy.deepcopy(convoy.parallelize(Net(), "filter=2", IMAGES[0])).eval()
    plain = Net().eval()
    for net in (twin, plain):
        net.forward = lambda x, net=net: net.out(net.b(net.a(x)).mean((2, 3)))
    with torch.no_grad():
        torch.testing.assert_close(twin(IMAGES[0]), plain(IMAGES[0]), rtol=0, atol=1e-12)


def _with_another_branch():
    net = convoy.parallelize(Net(), "stage=2", IMAGES[0])
    net.branch = True
    with pytest.raises(ConvoyError, match=r"extra\.(weight|bias) is used in another stage now than when"):
        net(IMAGES[0])


def _with_dropout(plan):
    """Weights after updates where dropout begins later."""
    samples = SAMPLES // 2 if plan == "sample=2" else SAMPLES
    net = convoy.parallelize(Net(dropout=True), plan, IMAGES[0, :samples], seed=3)
    mine = convoy.local_samples(net, SAMPLES)
    for number, (images, labels) in enumerate(zip(IMAGES, LABELS, strict=True)):
        net.drop.p = 0.1 * number
        net.temperature = 1.0 + number
        net.zero_grad()
        F.cross_entropy(net(images[mine]), labels[mine]).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    return convoy.state_dict(net)


def _drawn_in_evaluation(plan):
    """Outputs of two passes with dropout on, of a network in evaluation, and those whose turn it was."""
    net = convoy.parallelize(Net(dropout=True), plan, IMAGES[0, : 6 // (1 + (plan == "sample=2"))], seed=3).eval()
    net.drop.train()
    net.drop.p = 0.5
    mine = convoy.local_samples(net, SAMPLES)
    return mine, [net(images[mine]).detach() for images in (IMAGES[0], IMAGES[0])]


class Changing(nn.Module):
    """Does something of its own in its forward pass."""

    def __init__(self, what):
        super().__init__()
        torch.manual_seed(0)
        self.what, self.a, self.out = what, nn.Conv2d(3, 4, 3), nn.Linear(4, 4)
        self.calls, self.size, self.table, self.kept, self.tables = 0, None, None, None, {}
        if what == "tensor that counts":
            self.table = torch.zeros(())
        if what == "backward hook":
            self.out.register_full_backward_hook(lambda layer, inputs, outputs: (inputs[0] * 0.5,))
        if what == "hook on outputs":
            self.out.register_full_backward_pre_hook(lambda layer, outputs: (outputs[0].sign() * outputs[0] ** 2,))
        if what == "gradient hook":
            self.out.weight.register_hook(lambda gradient: gradient * 2)
        if what == "forward of its own":
            self.forward = types.MethodType(lambda self, x: self.out(self.a(x).mean((2, 3))) * 2, self)
        self.double()

    def forward(self, x):
        x = self.a(x)
        if self.what == "counter":
            self.calls += 1
            x = x * self.calls
        if self.what == "tensor that counts":
            self.table = self.table + 1
            x = x * self.table
        if self.what == "first pass":
            x = x if self.calls else x * 2
            self.calls = 1
        if self.what == "keeps":
            self.kept = x
        if self.what == "values":
            self.size = x.shape[-2:]
            self.table = torch.arange(6.0) if self.table is None else self.table
            self.tables.setdefault(x.shape[1:], self.table + 1)
            x = x * self.size[0] + self.tables[x.shape[1:]]
        return self.out(x.mean((2, 3)))


def _loop(net, images, labels, mine=slice(None)):
    for _ in range(3):
        net.zero_grad()
        F.cross_entropy(net(images[mine]), labels[mine]).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
    return net


def _changing(plan, what):
    """How far the weights are from those of the plain network, how it was captured, and what is left in the network."""
    want = _loop(Changing(what), IMAGES[0], LABELS[0]).state_dict()
    net = convoy.parallelize(Changing(what), plan, IMAGES[0, : SAMPLES // 2])
    _loop(net, IMAGES[0], LABELS[0], convoy.local_samples(net, SAMPLES))
    off = max((x - want[name]).abs().max().item() for name, x in convoy.state_dict(net).items())
    return off, net._convoy.captured, net.calls


def _refused(what, words):
    seen = {}
    net = Changing(what)
    if what == "hook":
        net.a.register_forward_hook(lambda layer, inputs, output: seen.__setitem__("a", output))
    with pytest.raises(ConvoyError, match=words):
        convoy.parallelize(net, "sample=2", IMAGES[0, :3])
    assert not seen
    assert net.kept is None


def _kept_on_one_device():
    net, seen = Changing("keeps"), []
    net.a.register_forward_hook(lambda layer, inputs, output: seen.append(output))
    net = convoy.parallelize(net, "serial", IMAGES[0])
    assert not seen
    net(IMAGES[0])
    assert net.kept is seen[-1]
    assert type(net.kept) is torch.Tensor


class Frozen(Net):
    """Its batch norm stays in evaluation, as in detectors, and `train` freezes it."""

    def train(self, mode=True):
        super().train(mode)
        self.bn.eval()
        self.bn.weight.requires_grad_(False)
        return self


MODES = {
    "as built": lambda net: None,
    "train": lambda net: net.train(),
    "evaluation and back": lambda net: net.eval().train(),
    "a layer in training": lambda net: net.eval().bn.train(),
}


def _moded(net, plan, mode):
    mine = slice(None) if plan is None else convoy.local_samples(net, SAMPLES)
    MODES[mode](net)
    weights = [p for p in net.parameters() if p.requires_grad]
    for images, labels in zip(IMAGES[:3], LABELS[:3], strict=True):
        net.zero_grad()
        F.cross_entropy(net(images[mine]), labels[mine]).backward()
        with torch.no_grad():
            for parameter in weights:
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    return net.state_dict() if plan is None else convoy.state_dict(net)


def _modes(plan):
    found = {}
    for mode in MODES:
        want = _moded(Frozen(), None, mode)
        net = Frozen()
        net = convoy.parallelize(net, plan, IMAGES[0, : SAMPLES // 2 if plan == "sample=2" else SAMPLES])
        got = _moded(net, plan, mode)
        found[mode] = max((got[name] - x).abs().max().item() for name, x in want.items())
    return found


@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "stage=2"])
def test_changes_after_parallelize_are_seen(plan):
    changes = [name for name in CHANGES if (name, plan) != ("branch", "stage=2")]
    for found in run_ranks(_distances, 2, plan, changes):
        assert max(found.values()) < 1e-12, {name: off for name, off in found.items() if off > 1e-12}


def test_another_branch_and_forward_of_a_copy() -> None:
    run_ranks(_with_another_branch, 2)
    run_ranks(_copied, 2)


def test_dropout_that_begins_later_is_that_of_one_device():
    (want,) = run_ranks(_with_dropout, 1, "serial")
    for got in run_ranks(_with_dropout, 2, "sample=2"):
        assert max((got[name] - x).abs().max().item() for name, x in want.items()) < 1e-12


def test_a_layer_that_draws_in_evaluation():
    ((_, (first, second)),) = run_ranks(_drawn_in_evaluation, 1, "serial")
    assert (first - second).abs().max() > 1e-3
    for plan in ("sample=2", "filter=2", "stage=2"):
        for mine, got in run_ranks(_drawn_in_evaluation, 2, plan):
            for x, want in zip(got, (first, second), strict=True):
                assert (x - want[mine]).abs().max() < 1e-12, plan


CAPTURED = ("values", "forward of its own")
UNCAPTURED = ("counter", "tensor that counts", "first pass", "backward hook", "hook on outputs")


@pytest.mark.parametrize("what", [*CAPTURED, *UNCAPTURED])
def test_what_forward_does_by_itself_is_done(what):
    for off, captured, calls in run_ranks(_changing, 2, "sample=2", what):
        assert off < 1e-12
        assert captured.startswith("whole on every rank, as ") == (what in UNCAPTURED)
        assert calls == {"counter": 3, "first pass": 1}.get(what, 0)


def test_what_would_not_be_there_after_a_pass_is_refused_but_on_one_device():
    for what, words in [
        ("keeps", "it keeps a tensor of its forward pass in kept.*: return it from forward"),
        ("hook", r"a hook or function keeps a tensor of its forward pass \(a\).*: return it from forward"),
        ("gradient hook", r"out\.weight has a gradient hook, which would see this rank's part"),
    ]:
        run_ranks(_refused, 2, what, words)
    run_ranks(_kept_on_one_device, 1)


@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "stage=2"])
def test_modes_are_those_of_the_model(plan):
    for found in run_ranks(_modes, 2, plan):
        assert max(found.values()) < 1e-12, found
