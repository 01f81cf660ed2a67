"""Loops over a network in stages: what may change from pass to pass, and what is refused; more in `test_exact.py`."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactness import build, relative, worst_gradient
from odd_nets import Layers, calling, coupled
from torch import Tensor, nn

import convoy
from ranks import RankFailed, run_ranks

IMAGES = torch.randn(8, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(8)
LOSS = Callable[[Any, Tensor], Any]


class TwoHeads(nn.Module):
    """Two outputs, one of which the first stage gives, and an argument that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.stem = nn.AvgPool2d(2), nn.Conv2d(3, 4, 3)
        self.early, self.last = nn.Linear(4, 10), nn.Linear(4, 10)

    def forward(self, x: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        x = self.stem(self.pool(x)).mean((2, 3))
        return self.last(x.relu() * factor), self.early(x)


def staged(plain: nn.Module, first: str, args: tuple[Any, ...] = (IMAGES[:4],), **options: Any) -> nn.Module:
    """A copy of a network in two stages, of which the second begins at layer `first`."""
    return convoy.parallelize(copy.deepcopy(plain), {"mesh": {"stage": 2}, "stages": [first]}, args, **options)


def both(first: str, args: tuple[Any, ...] = (IMAGES[:4],), **options: Any) -> tuple[nn.Module, nn.Module]:
    plain = TwoHeads().double()
    return staged(plain, first, args, **options), plain


def gradients_come_and_go() -> list[float]:
    nets, worst = both("stem"), []
    for layer, frozen, of_input in [
        ("", False, False),
        ("", False, True),
        ("stem", True, False),
        ("stem", False, True),
    ]:
        inputs = [IMAGES.clone().requires_grad_(of_input) for _ in nets]
        for net, own in zip(nets, inputs, strict=True):
            net.zero_grad()
            net.get_submodule(layer).requires_grad_(not frozen)
            sum(each.square().mean() for each in net(own)).backward()
        worst.append(worst_gradient(*nets))
        if of_input:
            worst.append(relative(inputs[0].grad, inputs[1].grad, 1.0))
    return worst


def two_passes() -> list[float]:
    nets = both("last")
    for net in nets:
        first, second = net(IMAGES), net(IMAGES.flip(0))
        sum((a * b).mean() for a, b in zip(first, second, strict=True)).backward()
    return [worst_gradient(*nets)]


def heads_are_left_out() -> list[float]:
    nets, worst = both("last", (IMAGES[:4], 3.0)), []
    for schedule in ("loop", "1f1b", "zero-bubble"):
        for used in [(0, 1), (0,), (1,)]:
            for net in nets:
                net.zero_grad()

                def loss(outputs: Any, labels: Tensor, used: tuple[int, ...] = used) -> Any:
                    return sum(F.cross_entropy(outputs[number], labels) for number in used)

                if schedule == "loop" or net is nets[1]:
                    loss(net(IMAGES, 3.0), LABELS).backward()
                else:
                    convoy.forward_backward(net, (IMAGES, 3.0), LABELS, loss, schedule=schedule)
            worst.append(worst_gradient(*nets))
    return worst


@pytest.mark.parametrize("loop", [gradients_come_and_go, two_passes, heads_are_left_out])
def test_what_a_loop_asks_of_a_pass_may_change(loop: Callable[[], list[float]]) -> None:
    for found in run_ranks(loop, 2):
        assert max(found) < 1e-12, found


class Chain(nn.Module):
    """Two stages that share a weight, or of which the last returns one of the first."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied = tied
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Any:
        y = self.last(self.middle(self.first(x)).relu())
        return y if self.tied else (y, self.first.weight)


def changes_its_mind() -> None:
    passes = iter(range(8))
    convoy.forward_backward(
        both("last")[0],
        IMAGES,
        LABELS,
        lambda y, x: F.cross_entropy(y[0], x) + (y[1].sum() if next(passes) else 0),
    )


def twice() -> None:
    total = staged(build("dense")[0], "norm")(IMAGES).sum()
    total.backward(retain_graph=True)
    total.backward()


def first_head(outputs: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], labels)


def of_loss(loss: LOSS) -> Callable[[], object]:
    return lambda: convoy.forward_backward(both("last", microbatches=2)[0], IMAGES[:4], LABELS[:4], loss)


def unlike(first: str, second: str, before: bool = False) -> Callable[[], object]:
    """Ranks with schedules of their own, in the first update or the second; `loop`: a pass of the network itself."""

    def script() -> None:
        net, _ = both("last", microbatches=2)
        for schedule in [first] * before + [first if convoy.rank() == 0 else second]:
            if schedule == "loop":
                net(IMAGES[:4])
            else:
                convoy.forward_backward(net, IMAGES[:4], LABELS[:4], first_head, schedule=schedule)

    return script


def without_gradients() -> None:
    with torch.no_grad():
        of_loss(first_head)()


def complex_outputs() -> None:
    net = Layers(lambda net, x: (net.conv(x), torch.fft.fft2(net.other(x))))
    staged(net.double(), "other")(IMAGES[:4])


UNLIKE = "in convoy.forward_backward with schedule='gpipe' while rank 0 is in .* with schedule='1f1b'"
RETURNED = "the loss function .* returned "
MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a second backward pass": (twice, "add the losses up and call it once"),
    "tied weights": (
        lambda: staged(Chain(True), "middle", (torch.zeros(2, 4),)),
        "layers first and last share first.weight, and are in stages 1 and 2",
    ),
    "a weight of an early stage": (
        lambda: staged(Chain(False), "last", (torch.zeros(2, 4),)),
        "returns first.weight, which stage 1 has and the last one lacks",
    ),
    "a loss of other outputs": (changes_its_mind, "a value of the network itself for one part .* same outputs"),
    "a complex value": (
        lambda: staged(calling("fft2")().double(), "plain"),
        "layer strange gives a tensor that is complex128, which stage 1 cannot send to stage 2: begin a stage els",
    ),
    "nine dimensions": (
        lambda: staged(calling("reshape", (-1, 1, 1, 1, 1, 1, 4, 6, 6))().double(), "plain"),
        "layer strange gives a tensor that is of 9 dimensions, which stage 1 cannot send to stage 2",
    ),
    "a complex output": (
        complex_outputs,
        "returns a tensor that is complex.*, which the last stage cannot send to the ot",
    ),
    "samples of another shape": (
        lambda: convoy.parallelize(
            nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 2)), "stage=2", torch.zeros(4, 3, 4)
        )(torch.zeros(4, 3, 5)),
        r"cannot be run in training with samples of \[3, 5\] of .*: layer 1: .*; the example .* has",
    ),
    "no parts": (lambda: both("last", microbatches=0), "microbatches=0 must be a whole number from 1"),
    "parts of what has no samples": (
        lambda: staged(coupled(lambda x: x, "weight")().double(), "fc", microbatches=2, batch_norm="microbatch"),
        "returns a tensor in which there are no samples, so a pass cannot be cut into 2 parts",
    ),
    "compiled": (
        lambda: both("last", compile=True),
        "in stages is not compiled, .*: leave compile away, or choose a plan",
    ),
    "no_grad": (without_gradients, r"call it outside of torch\.no_grad"),
    "targets of others": (
        lambda: convoy.forward_backward(both("last")[0], IMAGES[:4], LABELS, first_head),
        r"given 4 samples, and a target of shape \[8\]: pass the targets of this rank's",
    ),
    "no loss": (of_loss(lambda y, x: None), RETURNED + "None: let it return a scalar"),
    "losses": (
        of_loss(lambda y, x: F.cross_entropy(y[0], x, reduction="none")),
        RETURNED + r"a tensor of shape \[\d\]",
    ),
    "a detached loss": (
        of_loss(lambda y, x: F.cross_entropy(y[0].detach(), x)),
        RETURNED + "float64 without a gradient: let it return a real number",
    ),
    "hits": (
        of_loss(lambda y, x: (y[0].argmax(1) == x).sum()),
        RETURNED + "int64 without a gradient: let it return a re",
    ),
    "schedules": (unlike("1f1b", "gpipe"), UNLIKE),
    "later schedules": (unlike("1f1b", "gpipe", True), UNLIKE),
    "a pass of the network": (
        unlike("1f1b", "loop"),
        "rank 1 is in a pass of the network while rank 0 is in .*: all ranks call convoy.forward_backward with",
    ),
}


ON_ONE_RANK = ("a loss of other outputs", "no loss", "losses", "a detached loss", "hits")
"""What only the last stage can know, while the first waits for it."""


def mistaken(name: str) -> str:
    try:
        MISTAKES[name][0]()
    except convoy.ConvoyError as error:
        if name in ON_ONE_RANK:
            raise
        return str(error)
    return ""


def test_mistakes_are_said_on_every_rank() -> None:
    for name in MISTAKES.keys() - set(ON_ONE_RANK):
        texts = run_ranks(mistaken, 2, name)
        assert all(texts) and any(re.search(MISTAKES[name][1], text, re.DOTALL) for text in texts), (name, texts)


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_a_mistake_of_the_last_stage_ends_the_others_too(name: str) -> None:
    with pytest.raises(RankFailed, match="(?s)" + MISTAKES[name][1]):
        run_ranks(mistaken, 2, name)
