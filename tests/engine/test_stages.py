"""Networks in stages: schedules, what waits and is let go, what may change from pass to pass, what is refused."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactness import build, relative, worst_gradient
from torch import Tensor, nn

import convoy
from convoy.engine.network import network_of
from convoy.engine.stages import StagedNetwork
from ranks import RankFailed, run_ranks


def passes_of_many_kinds(plan: str, parts: int, returns_memory: bool = False) -> float:
    """The worst difference from one device where passes of many sizes and schedules follow each other."""
    plain, worst = build("chain")[0], 0.0
    x, y = torch.randn(9, 3, 8, 8, dtype=torch.float64), torch.randint(0, 6, (9,))
    net = convoy.parallelize(copy.deepcopy(plain), plan, x[:4], microbatches=parts, checks=False)
    network = network_of(net)
    assert isinstance(network, StagedNetwork)
    network.returns_memory = returns_memory
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, plain)]
    updates = [(8, "1f1b"), (8, "zero-bubble"), (4, "1f1b"), (9, ""), (9, ""), (8, "gpipe"), (4, ""), (4, "1f1b")]
    for size, schedule in updates:
        mine = convoy.local_samples(net, size)
        for optimizer in optimizers:
            optimizer.zero_grad()
        if schedule:
            convoy.forward_backward(net, x[mine], y[mine], F.cross_entropy, schedule=schedule)
        else:
            F.cross_entropy(net(x[mine]), y[mine]).backward()
        F.cross_entropy(plain(x[:size]), y[:size]).backward()
        worst = max(worst, worst_gradient(net, plain))
        for optimizer in optimizers:
            optimizer.step()
        mine = convoy.local_samples(net, 3)
        with torch.no_grad():
            worst = max(worst, relative(net(x[mine]), plain(x[mine])))
    return worst


@pytest.mark.slow
def test_passes_of_other_kinds_may_follow() -> None:
    for plan, parts, returns_memory in (("stage=2", 4, False), ("stage=3", 2, True)):
        assert max(run_ranks(passes_of_many_kinds, int(plan[-1]), plan, parts, returns_memory)) < 1e-12, plan


IMAGES = torch.randn(8, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(8)


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
    for layer, frozen, of_input in (("", 0, False), ("", 0, True), ("stem", 1, False), ("stem", 0, True)):
        inputs = [IMAGES.clone().requires_grad_(of_input) for _ in nets]
        for net, own in zip(nets, inputs, strict=True):
            net.zero_grad()
            net.get_submodule(layer).requires_grad_(not frozen)
            sum(each.square().mean() for each in net(own)).backward()
        worst.append(worst_gradient(*nets))
        if of_input:
            worst.append(relative(inputs[0].grad, inputs[1].grad))
    return worst


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


@pytest.mark.parametrize("loop", [gradients_come_and_go, heads_are_left_out])
def test_what_a_loop_asks_of_a_pass_may_change(loop: Callable[[], list[float]]) -> None:
    for found in run_ranks(loop, 2):
        assert max(found) < 1e-12, found


def changes_its_mind() -> None:
    passes = iter(range(8))

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], labels) + (outputs[1].sum() if next(passes) else 0)

    convoy.forward_backward(both("last")[0], IMAGES, LABELS, loss)


def twice() -> None:
    total = staged(build("dense")[0], "norm")(IMAGES).sum()
    total.backward(retain_graph=True)
    total.backward()


def breaks_off() -> None:
    """The last stage has asked for the second part, and a batch of another size comes next."""
    net, _ = both("last", microbatches=2)
    net(IMAGES[:6])  # it is known how values lie
    network, parts = network_of(net), iter(range(2))
    run = network._run

    def broken(*args: Any) -> Any:
        assert next(parts) < 1 - network.stage  # type: ignore[attr-defined]
        return run(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(network, "_run", broken)
        net(IMAGES[:6])
    net(IMAGES)


def first_head(outputs: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], labels)


def unlike() -> None:
    """Ranks with schedules of their own, in the second update."""
    net, _ = both("last", microbatches=2)
    for schedule in ("1f1b", "1f1b" if convoy.rank() == 0 else "gpipe"):
        convoy.forward_backward(net, IMAGES[:4], LABELS[:4], first_head, schedule=schedule)


UNLIKE = "in convoy.forward_backward with schedule='gpipe' while rank 0 is in .* with schedule='1f1b'"
OF_THE_LAST = ("a loss of other outputs", "a pass that broke off")
"""What only the last stage can know, while the first waits for it."""
MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a second backward pass": (twice, "add the losses up and call it once"),
    "a loss of other outputs": (changes_its_mind, "a value of the network itself for one part .* same outputs"),
    "a pass that broke off": (breaks_off, "a pass broke off between the stages"),
    "schedules": (unlike, UNLIKE),
}


def mistaken(name: str) -> str:
    try:
        MISTAKES[name][0]()
    except convoy.ConvoyError as error:
        if name in OF_THE_LAST:
            raise
        return str(error)
    return ""


def test_mistakes_are_said_on_every_rank_and_that_of_the_last_stage_ends_the_others() -> None:
    for name, (_, words) in MISTAKES.items():
        if name in OF_THE_LAST:
            with pytest.raises(RankFailed, match=f"(?s){words}"):
                run_ranks(mistaken, 2, name)
        else:
            texts = run_ranks(mistaken, 2, name)
            assert all(texts) and any(re.search(words, text, re.DOTALL) for text in texts), (name, texts)
