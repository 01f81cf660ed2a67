"""Schedules of a network in stages: what each does, in which order, and that all give what one device does."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from exactness import relative, worst_gradient
from torch import Tensor, nn

import convoy
from convoy.comm.collectives import Pending
from convoy.comm.stage_links import Sent
from convoy.engine.network import network_of
from convoy.engine.stages import StagedNetwork
from convoy.ops import onednn
from convoy.ops.postponed import PostponedGradients
from convoy.plans.schedule import actions, bubble
from ranks import RankFailed, run_ranks


def test_a_schedule_runs_forward_before_backward_and_both_in_order() -> None:
    assert actions("gpipe", 2, stage=0, stages=2) == [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]
    for stage in range(3):
        order = actions("1f1b", 5, stage, 3)
        assert [part for kind, part in order if kind == "forward"] == list(range(5))
        assert [part for kind, part in order if kind == "backward"] == list(range(5))
        running = most = 0
        for kind, _ in order:
            running += 1 if kind == "forward" else -1
            most = max(most, running)
        assert most == 3 - stage
    ahead = [
        next(place for place, (kind, _) in enumerate(actions("zero-bubble", 9, stage, 3)) if kind != "forward")
        for stage in range(3)
    ]
    assert ahead == [9, 4, 1]  # nobody waits for gradients of the first
    assert bubble("1f1b", 8, 2) == pytest.approx(1 / 9)


def test_zero_bubble_computes_each_weight_gradient_once_and_after_its_backward_pass() -> None:
    for stages, parts in ((2, 1), (2, 4), (4, 3), (4, 9)):
        for stage in range(stages):
            back, weights = -1, -1
            for kind, part in actions("zero-bubble", parts, stage, stages):
                if kind == "backward":
                    assert part == back + 1
                    back = part
                elif kind == "weights":
                    assert weights < part <= back
                    weights = part
            assert back == weights == parts - 1
    assert bubble("zero-bubble", 8, 2) == pytest.approx(1 / 25)


class Branches(nn.Module):
    """A skip connection over two cuts, two outputs, one of which an early stage gives, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.head = nn.Linear(6, 10)
        self.down = nn.Sequential(nn.Conv2d(6, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(inplace=True), nn.Dropout(0.3))
        self.up = nn.ConvTranspose2d(8, 6, 2, 2)
        self.last = nn.Conv2d(12, 10, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        early = self.head(x.mean((2, 3)))
        y = self.deep(self.down(x))
        return self.last(torch.cat((self.up(y) + x, x), 1)).mean((2, 3)), early


def loss_of(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs[0], labels) + 0.3 * F.cross_entropy(outputs[1], labels)


def scheduled(plan: Any, schedule: str, microbatches: int, sabotage: str = "") -> list[float]:
    """The worst differences of three updates from a plain loop over the same parts: losses, inputs, weights."""
    compute = PostponedGradients.compute

    def without_those_of_the_last_part(self: PostponedGradients, last: int) -> list[Tensor]:
        return compute(self, min(last, microbatches - 2))

    wrong = patch.object(PostponedGradients, "compute", without_those_of_the_last_part)
    with wrong if sabotage == "weights" else nullcontext():
        return differences(plan, schedule, microbatches, sabotage)


def differences(plan: Any, schedule: str, microbatches: int, sabotage: str) -> list[float]:
    torch.manual_seed(0)
    model = Branches().double()
    plain = copy.deepcopy(model)
    context = convoy.engine.prepare(plain, 5, "sync")
    x = torch.randn(9, 3, 8, 8, dtype=torch.float64)
    net = convoy.parallelize(model, plan, example=x[:2], batch_norm="microbatch", seed=5, microbatches=microbatches)
    network = network_of(net)
    assert isinstance(network, StagedNetwork)
    if sabotage == "parts":  # the second part of the batch is given twice
        before = network._announced

        def twice(*args: Any) -> Iterator[tuple[Tensor, ...]]:
            parts: list[tuple[Tensor, ...]] = []
            for part in before(*args):
                parts.append(part)
                yield parts[1] if len(parts) == 3 else part

        network._announced = twice  # type: ignore[method-assign]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (net, plain)]
    found = [0.0, 0.0, 0.0]
    for step in range(3):
        x = torch.randn(9, 3, 8, 8, dtype=torch.float64)
        y = torch.randint(0, 10, (9,))
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole, start, total = x.clone().requires_grad_(), 0, torch.zeros(())
        for size in [len(part) for part in torch.arange(9).tensor_split(microbatches)]:
            context.enter(step, start, (size,), x.device)
            value = loss_of(plain(whole[start : start + size]), y[start : start + size]) * (size / 9)
            value.backward()
            total, start = total + value.detach(), start + size
        mine = convoy.local_samples(net, 9)
        own = x[mine].clone().requires_grad_()
        if schedule == "loop":
            value = loss_of(net(own), y[mine])
            value.backward()
        else:
            value = convoy.forward_backward(net, own, y[mine], loss_of, schedule=schedule)  # type: ignore[arg-type]
        found[0] = max(found[0], relative(value.detach(), total, 1.0))
        found[1] = max(found[1], relative(own.grad, whole.grad[mine], 1.0))
        for optimizer in optimizers:
            optimizer.step()
    state = convoy.state_dict(net)
    for name, tensor in plain.state_dict().items():
        found[2] = max(found[2], relative(state[name].double(), tensor.double(), 1.0))
    held = sum(p.numel() for p in net.parameters())
    assert held < sum(p.numel() for p in plain.parameters()), "a rank holds its own stage alone"
    return found


AT_NAMES = {"mesh": {"stage": 3}, "layers": {}, "stages": ["down", "up"]}
"""With a skip connection over two cuts."""


@pytest.mark.parametrize(
    ("plan", "schedule"),
    [
        *(("stage=2", schedule) for schedule in ("loop", "gpipe", "1f1b", "zero-bubble")),
        ("stage=3", "1f1b"),
        (AT_NAMES, "zero-bubble"),
    ],
)
def test_schedules_give_what_a_loop_over_the_parts_does(plan: Any, schedule: str) -> None:
    for found in run_ranks(scheduled, 2 if plan == "stage=2" else 3, plan, schedule, 4):
        assert max(found) < 1e-12, found


@pytest.mark.parametrize(("schedule", "sabotage"), [("1f1b", "parts"), ("zero-bubble", "weights")])
def test_wrong_parts_are_noticed(schedule: str, sabotage: str) -> None:
    for found in run_ranks(scheduled, 2, "stage=2", schedule, 4, sabotage):
        assert max(found) > 1e-3, found


def wide_layers() -> float:
    """Weights large enough for messages of their own; the first update follows their uses, and postpones nothing."""
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 5)).double()
    x, y = torch.randn(8, 1, 8, 8, dtype=torch.float64), torch.randint(0, 5, (8,))
    net = convoy.parallelize(copy.deepcopy(plain), "stage=2,sample=2", x[:2], microbatches=2)
    mine, worst = convoy.local_samples(net, 8), 0.0
    for _ in range(3):
        net.zero_grad()
        convoy.forward_backward(net, x[mine], y[mine], F.cross_entropy, schedule="zero-bubble")
        plain.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        worst = max(worst, worst_gradient(net, plain))
    return worst


class FineTuned(nn.Module):
    """Convolutions whose weights are frozen, between norms that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.deep = nn.Conv2d(4, 4, 3).requires_grad_(False)
        self.last = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.deep(self.norm(self.stem(x)).relu()).mean((2, 3)))


def fine_tuned(accumulates: bool) -> float:
    plain = FineTuned().double()
    layers = {"last": {"gpu": "filter"}, "*": {"gpu": "sample"}}
    plan = {"mesh": {"stage": 2, "gpu": 2}, "layers": layers, "stages": ["norm"]}
    x, y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(0, 6, (8,))
    net = convoy.parallelize(copy.deepcopy(plain), plan, x[:4], microbatches=2, checks=False)
    mine = convoy.local_samples(net, 8)
    for last in (False, True) if accumulates else (True,):
        F.cross_entropy(plain(x), y).backward()
        with nullcontext() if last else convoy.accumulate(net):
            convoy.forward_backward(net, x[mine], y[mine], F.cross_entropy, schedule="zero-bubble")
    return worst_gradient(net, plain)


def beside_a_plain_pass() -> float:
    layers = (layer for _ in range(4) for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()))
    plain = nn.Sequential(*layers, nn.Flatten(), nn.Linear(192, 6)).double()
    x, y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(0, 6, (8,))
    net = convoy.parallelize(copy.deepcopy(plain), "stage=2", x[:4], microbatches=2, recompute=True, checks=False)
    loss = F.cross_entropy(net(x), y)
    convoy.forward_backward(net, x, y, F.cross_entropy, schedule="zero-bubble")
    loss.backward()
    (2 * F.cross_entropy(plain(x), y)).backward()
    return worst_gradient(net, plain)


@pytest.mark.parametrize(
    ("body", "world", "args"),
    [(wide_layers, 4, ()), (fine_tuned, 4, (False,)), (fine_tuned, 4, (True,)), (beside_a_plain_pass, 2, ())],
)
def test_postponed_gradients_are_those_of_one_device(body: Any, world: int, args: tuple[bool, ...]) -> None:
    """Large ones, those of ranks where only layers that are not divided postpone theirs, and of passes run again."""
    for found in run_ranks(body, world, *args):
        assert found < 1e-12, found


def trained_in_float32(prepares: bool, keeps: bool = False) -> tuple[list[Tensor], int]:
    """Weights after three updates of three parts, two of which have one size, and how many weights were laid out."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(256, 5)).to(memory_format=torch.channels_last)
    x = torch.randn(8, 16, 4, 4).to(memory_format=torch.channels_last)
    net = convoy.parallelize(model, "stage=2", x[:3], batch_norm="microbatch", microbatches=3, checks=False)
    network, laid_out = network_of(net), 0
    assert onednn.has_packing(torch.float32)
    assert isinstance(network, StagedNetwork)
    network.returns_memory = not prepares
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pack, of_all = onednn._Packed.__init__, dict[Any, Any]()

    def counting(self: Any, *args: Any) -> None:
        nonlocal laid_out
        laid_out += 1
        pack(self, *args)

    def begin_part(self: PostponedGradients) -> None:
        self._prepared = of_all
        self._parts.append({})

    stale = patch.object(PostponedGradients, "begin_part", begin_part) if keeps else nullcontext()
    with patch.object(onednn._Packed, "__init__", counting), stale:
        for _ in range(3):
            optimizer.zero_grad()
            convoy.forward_backward(net, x, torch.arange(8) % 5, F.cross_entropy, schedule="zero-bubble")
            optimizer.step()
    return [p.detach().clone() for p in net.parameters()], laid_out


def test_weights_that_are_laid_out_for_all_parts_are_those_of_the_update() -> None:
    """Two convolutions a stage, and two sizes of parts: four in each of three updates."""
    plain, packed, stale = (run_ranks(trained_in_float32, 2, *how) for how in ((False,), (True,), (True, True)))
    for (expected, none), (weights, laid_out), (wrong, _) in zip(plain, packed, stale, strict=True):
        assert (none, laid_out) == (0, 12)
        assert all(map(torch.equal, weights, expected))
        assert not all(map(torch.equal, wrong, expected)), "the control computes with the weights of the first update"


def chain_of_convolutions() -> nn.Sequential:
    layers = (nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()) for _ in range(4))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(192, 6)).double()


def passes_of_many_kinds(plan: str, parts: int, returns_memory: bool = False) -> tuple[float, list[int]]:
    """The worst difference from one device where what a stage waits for after an update is not what comes, and for how
    many parts of each kind it waits in the end."""
    plain, worst = chain_of_convolutions(), 0.0
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
            convoy.forward_backward(net, x[mine], y[mine], F.cross_entropy, schedule=schedule)  # type: ignore[arg-type]
        else:
            F.cross_entropy(net(x[mine]), y[mine]).backward()
        F.cross_entropy(plain(x[:size]), y[:size]).backward()
        worst = max(worst, worst_gradient(net, plain))
        for optimizer in optimizers:
            optimizer.step()
        mine = convoy.local_samples(net, 3)
        with torch.no_grad():
            worst = max(worst, relative(net(x[mine]), plain(x[mine]), 1.0))
    return worst, [len(waiting) for waiting in network._expected.values() if any(waiting[0])]


@pytest.mark.parametrize(("plan", "parts"), [("stage=2", 4), ("stage=3", 2), ("stage=2,sample=2", 2)])
def test_what_a_stage_waits_for_may_come_later(plan: str, parts: int) -> None:
    ranks = 4 if "sample" in plan else int(plan[-1])
    for waits, returns_memory in ((True, False), (False, True)):
        found = run_ranks(passes_of_many_kinds, ranks, plan, parts, returns_memory)
        assert max(worst for worst, _ in found) < 1e-12, found
        assert bool(found[-1][1]) is waits, "the last stage waits for no update: this test shows nothing"
        assert max(found[-1][1], default=0) == waits * min(parts, 3)


def two_networks_in_turns(apart: bool) -> float:
    """The worst difference from one device of two networks that go through the same process group."""
    plain = [chain_of_convolutions() for _ in range(2)]
    x, y, worst = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(0, 6, (8,)), 0.0
    nets = [convoy.parallelize(copy.deepcopy(each), "stage=2", x[:4], microbatches=2, checks=False) for each in plain]
    if not apart:  # as if each began to count
        for net in nets:
            tags = network_of(net).links._tags  # type: ignore[attr-defined]
            network_of(net).links._tag = lambda key, tags=tags: tags.setdefault(key, 1 + len(tags))  # type: ignore[attr-defined]
    for _ in range(3):
        for net, each in zip(nets, plain, strict=True):
            for _ in range(2):
                net.zero_grad()
                each.zero_grad()
                convoy.forward_backward(net, x, y, F.cross_entropy)
                F.cross_entropy(each(x), y).backward()
                worst = max(worst, worst_gradient(net, each))
    return worst


def test_two_networks_do_not_receive_what_the_other_waits_for() -> None:
    for found in run_ranks(two_networks_in_turns, 2, True):
        assert found < 1e-12, found
    with pytest.raises(RankFailed, match="rank 1 died with exit status -6"):  # gloo: sizes differ
        run_ranks(two_networks_in_turns, 2, False)


END = Sent(to=-1, part=-1, back=False, pending=Pending([], lambda: torch.empty(0)))
"""Is let go with everything else."""


def parts_on_their_way(plan: str, schedule: str, release: bool) -> int:
    """Of how many parts a rank holds values or gradients for others at once, at most, in an update of six parts."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 3, 8, 8, dtype=torch.float64), torch.randint(0, 10, (6,))
    net = convoy.parallelize(Branches().double(), plan, x[:2], batch_norm="microbatch", seed=5, microbatches=6)
    network, most = network_of(net), 0
    assert isinstance(network, StagedNetwork)
    links = network.links
    send, let_go = links.send, links.release

    def counting(*args: Any, **options: Any) -> None:
        nonlocal most
        send(*args, **options)
        most = max(most, len({sent.part for sent in links._sending}))

    links.send = counting  # type: ignore[method-assign]
    if not release:  # but at the end, when everything is
        links.release = lambda is_received: let_go(is_received) if is_received(END) else None  # type: ignore[method-assign]
    convoy.forward_backward(net, x, y, loss_of, schedule=schedule)  # type: ignore[arg-type]
    return most


def test_what_others_have_received_is_let_go() -> None:
    """As many parts are held as the first stage runs ahead, which for zero-bubble is all of them."""
    assert run_ranks(parts_on_their_way, 2, "stage=2", "1f1b", False) == [6, 6], "the control holds all to the end"
    for plan, schedule, most in (("stage=2", "1f1b", [2, 2]), ("stage=3", "1f1b", [3, 3, 3])):
        assert run_ranks(parts_on_their_way, len(most), plan, schedule, True) == most


def kept_by_evaluation(release: bool) -> int:
    """How many values a rank still holds for others after five batches of which nothing comes back."""
    x = torch.ones(4, 3, 8, 8, dtype=torch.float64)
    net = convoy.parallelize(Branches().double().eval(), "stage=3", x[:2], microbatches=2)
    links = network_of(net).links  # type: ignore[attr-defined]
    if not release:
        links.release = lambda _: None
    with torch.no_grad():
        for _ in range(5):
            net(x)
    return len(links._sending)


def test_evaluation_keeps_nothing_for_others() -> None:
    assert max(run_ranks(kept_by_evaluation, 3, False)) > 9, "the control keeps what it sends"
    assert run_ranks(kept_by_evaluation, 3, True) == [0, 0, 0]
