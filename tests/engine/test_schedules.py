"""Schedules of a network in stages: what each does, in which order, and that all give what one device does."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from exactness import Distance, _loss, build, distance, relative, worst_gradient
from own_loops import world_of
from torch import Tensor, nn

import convoy
from convoy.comm.collectives import Pending
from convoy.comm.stage_links import Sent
from convoy.engine.network import network_of
from convoy.engine.stages import StagedNetwork
from convoy.ops import onednn
from convoy.ops.postponed import PostponedGradients
from convoy.plans.schedule import actions, bubble, in_flight
from ranks import RankFailed, run_ranks


def test_a_schedule_runs_forward_before_backward_and_both_in_order() -> None:
    assert actions("gpipe", 2, stage=0, stages=2) == [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]
    assert [in_flight("1f1b", 5, stage, 3) for stage in range(3)] == [3, 2, 1]
    ahead = [
        next(place for place, (kind, _) in enumerate(actions("zero-bubble", 9, stage, 3)) if kind != "forward")
        for stage in range(3)
    ]
    assert ahead == [9, 4, 1]  # nobody waits for gradients of the first
    assert bubble("1f1b", 8, 2) == pytest.approx(1 / 9) and bubble("zero-bubble", 8, 2) == pytest.approx(1 / 25)


PARTS = {"batches": (9, 7), "steps": 3, "microbatches": 4}
AT_NAMES = {"mesh": {"stage": 3}, "layers": {}, "stages": ["down", "up"]}
"""With a skip connection over two cuts."""
FILTERS = {
    "mesh": {"stage": 2, "gpu": 2},
    "layers": {"last": {"gpu": "filter"}, "*": {"gpu": "sample"}},
    "stages": ["norm"],
}
"""Of layers whose gradients are postponed, only some are added over ranks."""
CASES: list[tuple[str, Any, int, str]] = [
    *(("branches", "stage=2", 2, schedule) for schedule in ("loop", "gpipe", "1f1b", "zero-bubble")),
    ("branches", "stage=3", 3, "1f1b"),
    ("branches", AT_NAMES, 3, "zero-bubble"),
    ("wide", "stage=2,sample=2", 4, "zero-bubble"),
    ("fine tuned", FILTERS, 4, "zero-bubble"),
]


def scheduled(net: str, plan: Any, schedule: str) -> Distance:
    return distance(net, plan, schedule=schedule, **PARTS)


def test_schedules_give_what_a_loop_over_the_parts_does() -> None:
    for net, plan, world, schedule in CASES:
        for found in run_ranks(scheduled, world, net, plan, schedule):
            assert found.ok, (net, plan, schedule, found)


def without_those_of_the_last_part(
    self: PostponedGradients, last: int, compute: Any = PostponedGradients.compute
) -> Any:
    return compute(self, min(last, PARTS["microbatches"] - 2))


def the_second_part_twice(self: StagedNetwork, *args: Any, before: Any = StagedNetwork._announced) -> Iterator[Any]:
    parts: list[Any] = []
    for part in before(self, *args):
        parts.append(part)
        yield parts[1] if len(parts) == 3 else part


def broken(owner: type, name: str, wrong: Any, schedule: str) -> bool:
    with patch.object(owner, name, wrong):
        return scheduled("branches", "stage=2", schedule).ok


def test_wrong_parts_are_noticed() -> None:
    case = PostponedGradients, "compute", without_those_of_the_last_part, "zero-bubble"
    assert not all(run_ranks(broken, 2, *case))
    assert not all(run_ranks(broken, 2, StagedNetwork, "_announced", the_second_part_twice, "1f1b"))


def beside_a_plain_pass() -> float:
    """A pass that is computed again computes what it did, beside one whose gradients are postponed."""
    plain, x, y = build("chain")[0], torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.arange(8)
    plan = "stage=2,sample=2"
    net = convoy.parallelize(copy.deepcopy(plain), plan, x[:2], microbatches=2, recompute=True, checks=False)
    mine = convoy.local_samples(net, 8)
    loss = F.cross_entropy(net(x[mine]), y[mine])
    with convoy.accumulate(net):
        convoy.forward_backward(net, x[mine], y[mine], F.cross_entropy, schedule="zero-bubble")
    loss.backward()
    (2 * F.cross_entropy(plain(x), y)).backward()
    return worst_gradient(net, plain)


def passes_of_many_kinds(plan: str, parts: int, returns_memory: bool = False) -> tuple[float, list[int]]:
    """The worst difference from one device where what a stage waits for after an update is not what comes, and for how
    many parts of each kind it waits in the end."""
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
            worst = max(worst, relative(net(x[mine]), plain(x[mine]), 1.0))
    return worst, [len(waiting) for waiting in network._expected.values() if any(waiting[0])]


def test_what_a_stage_waits_for_may_come_later() -> None:
    assert max(run_ranks(beside_a_plain_pass, 4)) < 1e-12
    for plan, parts in (("stage=2", 4), ("stage=3", 2), ("stage=2,sample=2", 2)):
        for waits, returns_memory in ((True, False), (False, True)):
            found = run_ranks(
                passes_of_many_kinds, 3 if plan == "stage=3" else world_of(plan), plan, parts, returns_memory
            )
            assert max(worst for worst, _ in found) < 1e-12, found
            assert bool(found[-1][1]) is waits, "the last stage waits for no update: this test shows nothing"
            assert max(found[-1][1], default=0) == waits * min(parts, 3)


def two_networks_in_turns(apart: bool) -> float:
    """The worst difference from one device of two networks that go through the same process group."""
    plain = [build("chain")[0] for _ in range(2)]
    x, y, worst = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(0, 6, (8,)), 0.0
    nets = [convoy.parallelize(copy.deepcopy(each), "stage=2", x[:4], microbatches=2, checks=False) for each in plain]
    if not apart:  # as if each began to count
        for net in nets:
            tags = network_of(net).links._tags
            network_of(net).links._tag = lambda key, tags=tags: tags.setdefault(key, 1 + len(tags))
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


def trained_in_float32(prepares: bool, keeps: bool = False) -> list[Tensor]:
    """Weights after three updates of three parts, of which two have one size."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(256, 5)).to(memory_format=torch.channels_last)
    x, of_all = torch.randn(8, 16, 4, 4).to(memory_format=torch.channels_last), dict[Any, Any]()
    net = convoy.parallelize(model, "stage=2", x[:3], batch_norm="microbatch", microbatches=3, checks=False)
    network_of(net).returns_memory = not prepares
    assert onednn.has_packing(torch.float32)

    def begin_part(self: PostponedGradients) -> None:
        self._prepared = of_all
        self._parts.append({})

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with patch.object(PostponedGradients, "begin_part", begin_part) if keeps else nullcontext():
        for _ in range(3):
            optimizer.zero_grad()
            convoy.forward_backward(net, x, torch.arange(8) % 5, F.cross_entropy, schedule="zero-bubble")
            optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def test_weights_that_are_laid_out_for_all_parts_are_those_of_the_update() -> None:
    plain, packed, stale = (run_ranks(trained_in_float32, 2, *how) for how in ((False,), (True,), (True, True)))
    for expected, weights, wrong in zip(plain, packed, stale, strict=True):
        assert all(map(torch.equal, weights, expected))
        assert not all(map(torch.equal, wrong, expected)), "the control computes with the weights of the first update"


END = Sent(to=-1, part=-1, back=False, pending=Pending([], lambda: torch.empty(0)))
"""Is let go with everything else."""


def parts_on_their_way(plan: str, schedule: str, release: bool) -> int:
    """Of how many parts a rank holds values or gradients for others at once, at most, in an update of six parts."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 3, 8, 8, dtype=torch.float64), torch.randint(0, 10, (6,))
    net = convoy.parallelize(build("branches")[0], plan, x[:2], batch_norm="microbatch", seed=5, microbatches=6)
    network, most = network_of(net), 0
    assert isinstance(network, StagedNetwork)
    links = network.links
    send, let_go = links.send, links.release

    def counting(*args: Any, **options: Any) -> None:
        nonlocal most
        send(*args, **options)
        most = max(most, len({sent.part for sent in links._sending}))

    links.send = counting
    if not release:  # but at the end, when everything is
        links.release = lambda is_received: let_go(is_received) if is_received(END) else None
    convoy.forward_backward(net, x, y, _loss, schedule=schedule)
    return most


def kept_by_evaluation(release: bool) -> int:
    """How many values a rank still holds for others after five batches of which nothing comes back."""
    x = torch.ones(4, 3, 8, 8, dtype=torch.float64)
    net = convoy.parallelize(build("branches")[0].eval(), "stage=3", x[:2], microbatches=2)
    links = network_of(net).links
    if not release:
        links.release = lambda _: None
    with torch.no_grad():
        for _ in range(5):
            net(x)
    return len(links._sending)


def test_what_others_have_received_is_let_go() -> None:
    """As many parts are held as the first stage runs ahead, and nothing after evaluation."""
    assert run_ranks(parts_on_their_way, 2, "stage=2", "1f1b", False) == [6, 6], "the control holds all to the end"
    for plan, schedule, most in (("stage=2", "1f1b", [2, 2]), ("stage=3", "1f1b", [3, 3, 3])):
        assert run_ranks(parts_on_their_way, len(most), plan, schedule, True) == most
    assert max(run_ranks(kept_by_evaluation, 3, False)) > 9, "the control keeps what it sends"
    assert run_ranks(kept_by_evaluation, 3, True) == [0, 0, 0]
