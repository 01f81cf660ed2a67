"""Loops of one's own give what they give on one device: arguments, losses, accumulation, several networks."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactness import worst_gradient
from odd_nets import base
from own_loops import IMAGES, LABELS, far, loss_of, rank, ranks_net, small, world_of
from torch import Tensor, nn

import convoy
from convoy.engine import network as network_module
from convoy.errors import ConvoyError
from ranks import replace_processes, run_ranks
from small_nets import Dense


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6 + 2, 4)

    def forward(self, x: Tensor, meta: Tensor | None = None, *, scale: float = 1.0, both: bool = False) -> Any:
        y = F.relu(self.stem(x)).mean((2, 3)) * (5.0 if scale is True else scale)
        meta = meta["of"][0] if isinstance(meta, dict) else meta
        y = torch.cat([y, torch.zeros_like(x[:, :2, 0, 0]) if meta is None else meta], 1)
        return (self.head(y), y) if both else self.head(y)


META = torch.randn(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
Pair = tuple[float, float]
"""How far a loop is from that of one device, and from another one."""


def called(plan: str) -> Pair:
    serial = Conditioned().double()
    net = convoy.parallelize(copy.deepcopy(serial), plan, {"x": IMAGES[:4], "meta": META[:4], "scale": 0.5})
    mine, worst = convoy.local_samples(net, 8), 0.0
    scales = ({"scale": scale} for scale in (1, True, 2.0))  # of which Python takes two for equal
    for options in ({"meta": META}, {"meta": META, "scale": 3.0}, *scales, {"meta": META, "both": True}):
        own = {key: value[mine] if isinstance(value, Tensor) else value for key, value in options.items()}
        got, want = net(IMAGES[mine], **own), serial(IMAGES, **options)
        got, want = (got[0], want[0]) if "both" in options else (got, want)
        net.zero_grad(), serial.zero_grad()
        F.cross_entropy(got, LABELS[mine]).backward()
        F.cross_entropy(want, LABELS).backward()
        worst = max(worst, worst_gradient(net, serial), (got - want[mine]).abs().max().item())
    torch.testing.assert_close(net(IMAGES[mine], META[mine]), net(x=IMAGES[mine], meta=META[mine]))
    with pytest.raises((ConvoyError, TypeError), match="unexpected keyword argument 'mta'"):
        net(IMAGES[mine], mta=META[mine])
    if plan != "serial":
        for kind in (list, tuple):
            nested = net(IMAGES[mine], meta={"of": kind([META[mine]])}) - net(IMAGES[mine], META[mine])
            worst = max(worst, nested.abs().max().item())
        with pytest.raises(ConvoyError, match=r"argument \w+ of the network is or holds something that may change"):
            net(IMAGES[mine], meta={META})
        with pytest.raises(ConvoyError, match=r"with argument scale = [12]\.5 in training, but rank . passes others"):
            net(IMAGES[mine], scale=1.5 + rank())
    other = net(IMAGES[mine], META[mine], scale=0.5) - serial(IMAGES, META, scale=3.0)[mine]
    return worst, other.abs().max().item()


def parts_of_the_loss(plan: str) -> Pair:
    """Where each rank gives its part of the global loss: as `loss="part"`, and taken for a mean."""
    found = []
    for loss in ("part", "mean"):
        serial, net = small(), convoy.parallelize(small(), plan, IMAGES[:4], loss=loss)
        mine = convoy.local_samples(net, 8)
        F.cross_entropy(serial(IMAGES), LABELS).backward()
        (F.cross_entropy(net(IMAGES[mine]), LABELS[mine], reduction="sum") / 8).backward()
        found.append(worst_gradient(net, serial))
    return found[0], found[1] if plan == "sample=2" else 1.0


def gradient_penalty(plan: str) -> Pair:
    """Of a rank's part of it, and where sums are not divided by the global batch."""
    found = []
    for number in (8, 4):
        serial, net = generator(), convoy.parallelize(generator(), plan, IMAGES[:4], loss="part")
        for each, samples, count in ((serial, slice(None), 8), (net, convoy.local_samples(net, 8), number)):
            images = IMAGES[samples].clone().requires_grad_()
            (slope,) = torch.autograd.grad(each(images).sum(), images, create_graph=True)
            ((slope.flatten(1).norm(dim=1) - 1).square().sum() / count).backward()
        found.append(worst_gradient(net, serial))
    return found[0], found[1]


def accumulated(plan: str, sizes: tuple[int, ...] = (5, 3, 4)) -> Pair:
    """Two updates' worth of batches, exchanged once; in the other case nothing is."""
    found = []
    for finish in (True, False):
        torch.manual_seed(0)
        serial = Dense().double()
        net = convoy.parallelize(copy.deepcopy(serial), plan, torch.zeros(2, 3, 8, 8, dtype=torch.float64))
        for number, size in enumerate(sizes * 2, 1):  # without setting the gradients to zero in between
            x, y = torch.randn(size, 3, 8, 8, dtype=torch.float64), torch.randint(0, 10, (size,))
            mine = convoy.local_samples(net, size)
            F.cross_entropy(serial(x), y).backward()
            with nullcontext() if finish and number % len(sizes) == 0 else convoy.accumulate(net):
                F.cross_entropy(net(x[mine]), y[mine]).backward()
        found.append(worst_gradient(net, serial))
    return found[0], found[1] if plan == "sample=2" else 1.0


def of_no_samples(plan: str) -> Pair:
    """A batch without samples between two others; in the other case it is left out."""
    found = []
    for sizes in ((8, 0, 8), (8, 8)):
        serial, net = small(), convoy.parallelize(small(), plan, IMAGES[:4])
        for size in (8, 0, 8):
            net.zero_grad()
            y = net(IMAGES[:size][convoy.local_samples(net, size)])
            (y.square().sum() / max(1, len(y))).backward()
        for size in sizes:
            serial.zero_grad()
            (serial(IMAGES[:size]).square().sum() / 8).backward()
        found.append(max(worst_gradient(net, serial), far(convoy.state_dict(net), serial.state_dict())))
    return found[0], found[1]


BODIES: list[tuple[Callable[..., Pair], list[str], tuple[Any, ...]]] = [
    (called, ["serial", "sample=2", "filter=2"], ()),
    (parts_of_the_loss, ["sample=2", "filter=2", "owt=2"], ()),
    (gradient_penalty, ["sample=2"], ()),
    (accumulated, ["sample=2", "owt=2", "serial"], ()),
    (accumulated, ["sample=2"], ((1, 4, 1),)),
    (of_no_samples, ["sample=2", "height=2", "filter=2"], ()),
]


@pytest.mark.parametrize(("body", "plans", "args"), BODIES)
def test_it_is_the_network_on_one_device_and_not_another(
    body: Callable[..., Pair], plans: list[str], args: tuple[Any, ...]
) -> None:
    for plan in plans:
        for error, other in run_ranks(body, world_of(plan), plan, *args):
            assert error < 1e-9 < 1e-7 < other, plan


def generator() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1)).double()


def chained(plan: str, share: int, mean: bool, undone: bool = True) -> float:
    """The worst gradient of two networks of which one feeds the other, and of one that feeds itself."""
    first, second, serial_first, serial_second = generator(), small(), generator(), small()
    convoy.parallelize(first, plan, IMAGES[:4])
    convoy.parallelize(second, plan, IMAGES[:4])
    if not undone:
        network_module.undo_scale = lambda x, share: x
    sampler = convoy.local_samples(first, 8)
    mine = sampler if sampler == slice(0, 8) else (slice(0, share) if sampler.start == 0 else slice(share, 8))
    worst = 0.0
    for feeds in ("other", "itself"):
        for g, d, samples, alone in ((first, second, mine, False), (serial_first, serial_second, slice(0, 8), True)):
            g.zero_grad(), d.zero_grad()
            made = g(IMAGES[samples])
            made = g(made) if feeds == "itself" else made
            losses = F.cross_entropy(d(made), LABELS[samples], reduction="none")
            direct = (made - IMAGES[samples]).abs().mean((1, 2, 3))  # beside the way through the second
            loss = (losses + direct).mean() if alone or not mean else convoy.global_mean(first, losses + direct)
            loss.backward()
        worst = max(worst, worst_gradient(first, serial_first), worst_gradient(second, serial_second))
    return worst


def test_networks_feed_each_other() -> None:
    for plan, share, mean in (("sample=2", 4, False), ("sample=2", 3, True), ("filter=2", 4, True)):
        assert max(run_ranks(chained, 2, plan, share, mean)) < 1e-8, plan  # through two networks, and back
    try:
        assert min(run_ranks(chained, 2, "sample=2", 4, False, False)) > 0.1, "shares count twice"
    finally:
        replace_processes()  # their `undo_scale` is another one


def looked_into() -> None:
    net, mine = ranks_net("filter=2")
    loss_of(net, mine).backward()
    gradient = net[0].weight.grad
    whole = convoy.gradients(net)["0.weight"]
    for function in (lambda g: g.sum(0), lambda g: g.numpy(), torch.std):
        with pytest.raises(ConvoyError, match=r"convoy\.gradients"):
            function(gradient)
    torch.testing.assert_close((gradient * 2 + 1).norm(), (whole * 2 + 1).norm())
    assert gradient.numel() == gradient.sign().nelement() == whole.numel()  # a mean of squares by norm and numel
    torch.optim.SGD(net.parameters(), 0.1, foreach=True).zero_grad(set_to_none=False)  # of parts and whole ones at once
    assert not gradient.any()


def test_gradients_of_parts_answer_for_the_whole_or_refuse() -> None:
    run_ranks(looked_into, 2)


@pytest.mark.filterwarnings("ignore")
def test_layers_that_are_compiled_inside_are_seen_through() -> None:
    net, plain_net = base(lambda: nn.BatchNorm2d(6)), base(lambda: nn.BatchNorm2d(6))
    net[0] = torch.compile(net[0])
    net[1].compile()
    net[4].forward = torch.compile(net[4].forward)
    made = convoy.parallelize(net.double(), "serial", IMAGES[:4])
    for each in (made, plain_net.double()):
        each(IMAGES).square().mean().backward()
    got = {name.replace("_orig_mod.", ""): gradient for name, gradient in convoy.gradients(made).items()}
    for name, parameter in plain_net.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)
