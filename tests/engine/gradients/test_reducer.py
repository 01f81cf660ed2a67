"""Gradients after `backward()` are those of the global batch, whatever a rank has or has not to send; in the order of a
tree they have the same bits on any number of ranks."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from convoy.comm.groups import Groups
from convoy.engine.gradients.reducer import GradientReducer
from convoy.engine.gradients.tree import TreeReducer
from convoy.plans.buckets import Sizes
from convoy.plans.mesh import Mesh
from ranks import run_ranks

SAMPLES = 7
SMALL = Sizes(alone=400, bucket=200, first=64)


class Net(nn.Module):
    """Large and small parameters, one that is used by some ranks only, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm, self.hidden, self.out = nn.GroupNorm(2, 8), nn.Linear(8 * 16, 24), nn.Linear(24, 5)
        self.sometimes, self.never = nn.Linear(24, 5), nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor, sometimes: bool = False) -> Tensor:
        x = self.hidden(self.norm(self.conv(x)).relu().flatten(1)).relu()
        return self.out(x) + self.sometimes(x) if sometimes else self.out(x)


def make() -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    return Net().double(), torch.randn(SAMPLES, 3, 4, 4).double(), torch.randint(0, 5, (SAMPLES,))


def shares(world: int) -> list[slice]:
    """Uneven; the last of four ranks has nothing."""
    ends = {2: [0, 5, 7], 3: [0, 4, 5, 7], 4: [0, 3, 6, 7, 7]}[world]
    return [slice(a, b) for a, b in pairwise(ends)]


def loss_of(net: Net, x: Tensor, y: Tensor, sometimes: bool = False) -> Tensor:
    """This rank's part of the mean over the global batch."""
    return F.cross_entropy(net(x, sometimes), y, reduction="sum") / SAMPLES


def difference(net: nn.Module, serial: nn.Module) -> float:
    pairs = [(p.grad, twin.grad) for p, twin in zip(net.parameters(), serial.parameters(), strict=True)]
    assert all((a is None) == (b is None) for a, b in pairs)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs if a is not None and b is not None)


def reducer_of(net: nn.Module, **options: Any) -> GradientReducer:
    groups = Groups(Mesh(("sample",), (dist.get_world_size(),)))
    return GradientReducer([(p, (0,)) for p in net.parameters()], groups, sizes=SMALL, **options)


@dataclass
class Pass:
    """A forward and a backward pass of `scale` times the images; before it gradients are set to zeros, or None."""

    scale: float = 1.0
    sometimes: bool = False
    is_paused: bool = False
    zero: str = ""


def auxiliary(net: Net, x: Tensor, y: Tensor, reducer: GradientReducer | None) -> None:
    """Two losses of one graph, the second of a few parameters only."""
    loss = loss_of(net, x, y)
    loss.backward(retain_graph=True)
    (net.conv.weight.square().sum() / (1 if reducer is None else dist.get_world_size())).backward()
    (loss * 2).backward()


def checkpointed(net: Net, x: Tensor, y: Tensor, reducer: GradientReducer | None) -> None:
    """Backward passes inside a backward pass, each of which ends by itself."""
    x = x.clone().requires_grad_()
    for _ in range(2):
        h = checkpoint(lambda x: net.norm(net.conv(x)).relu().flatten(1), x, use_reentrant=True)
        h = checkpoint(lambda h: net.hidden(h).relu(), h, use_reentrant=True)
        (F.cross_entropy(net.out(h), y, reduction="sum") / SAMPLES).backward()


SCENARIOS: dict[str, list[Pass] | Callable[..., None]] = {
    "three updates": [Pass(), Pass(zero="zeros"), Pass(zero="None")],
    "gradients that were reduced already": [Pass(), Pass(2, sometimes=True), Pass(3)],
    "accumulated": [Pass(), Pass(2, True, is_paused=True), Pass(3, is_paused=True), Pass(4)],
    "accumulated, then reduced": [Pass(is_paused=True)],
    "accumulated, then dropped": [Pass(), Pass(2, True, is_paused=True), Pass(4, zero="None")],
    "auxiliary": auxiliary,
    "checkpointed": checkpointed,
}


def play(scenario: Any, net: Net, x: Tensor, y: Tensor, reducer: GradientReducer | None) -> None:
    for one in [] if callable(scenario) else scenario:
        if one.zero:
            net.zero_grad(set_to_none=one.zero == "None")
        with reducer.paused() if reducer is not None and one.is_paused else nullcontext():
            loss_of(net, x * one.scale, y, one.sometimes).backward()
    if callable(scenario):
        scenario(net, x, y, reducer)
    elif reducer is not None and scenario[-1].is_paused:
        reducer.reduce()


def scenarios() -> dict[str, float]:
    found, mine = {}, shares(dist.get_world_size())[dist.get_rank()]
    for name, scenario in SCENARIOS.items():
        net, x, y = make()
        serial = copy.deepcopy(net)
        play(scenario, serial, x, y, None)
        play(scenario, net, x[mine], y[mine], reducer_of(net))
        found[name] = difference(net, serial)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_those_of_the_global_batch(world: int) -> None:
    for found in run_ranks(scenarios, world):
        assert max(found.values()) < 1e-12, found


def used_by_some() -> tuple[float, float]:
    """The worst error where each rank in turn uses a parameter alone; and where uneven shares weigh alike."""
    mine, worst = shares(3)[dist.get_rank()], 0.0
    net, x, y = make()
    serial = copy.deepcopy(net)
    reducer_of(net)
    for step in range(3):
        serial.zero_grad(), net.zero_grad()
        for rank, part in enumerate(shares(3)):
            loss_of(serial, x[part], y[part], sometimes=rank == step).backward()
        loss_of(net, x[mine], y[mine], sometimes=dist.get_rank() == step).backward()
        worst = max(worst, difference(net, serial))
    assert net.never.grad is None
    serial.zero_grad(), net.zero_grad()
    loss_of(serial, x, y).backward()
    (F.cross_entropy(net(x[mine]), y[mine]) / 3).backward()
    return worst, difference(net, serial)


def test_a_parameter_that_one_rank_uses_and_shares_that_weigh_alike() -> None:
    assert all(worst < 1e-12 < 1e-3 < unweighted for worst, unweighted in run_ranks(used_by_some, 3))


Bits = list[bytes | None]


def microbatch(net: nn.Module, index: int, num: int, skips: bool = False) -> None:
    """Forward and backward through a microbatch; every second one, or none, uses a parameter that the others do not."""
    generator = torch.Generator().manual_seed(index)
    x, y = torch.randn(3, 3, 4, 4, generator=generator), torch.randint(0, 5, (3,), generator=generator)
    (F.cross_entropy(net(x, not skips and index % 2 == 0), y) / num).backward()


def updated(num: int, begin: Callable[[nn.Module], Callable[[int], object]], updates: int = 2) -> list[Bits]:
    """The bits of all gradients in each update of `num` microbatches; a pass is told the number of the first."""
    net, bits = make()[0].float(), []
    optimizer, run = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), begin(net)
    for update in range(updates):
        optimizer.zero_grad()
        run(update * num)
        bits.append([None if p.grad is None else p.grad.contiguous().numpy().tobytes() for p in net.parameters()])
        optimizer.step()
    return bits


def tree_sum(leaves: list[Tensor | None]) -> Tensor | None:
    """As the module says it: the largest power of two below the number of leaves on the left."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    left, right = tree_sum(leaves[:half]), tree_sum(leaves[half:])
    return right if left is None else left if right is None else left + right


def alone(num: int, skips: bool) -> list[Bits]:
    def run(net: nn.Module, first: int) -> None:
        leaves = []
        for index in range(first, first + num):
            net.zero_grad()
            microbatch(net, index, num, skips)
            leaves.append([p.grad for p in net.parameters()])
        for p, *gradients in zip(net.parameters(), *leaves, strict=True):
            p.grad = tree_sum(gradients)

    return updated(num, lambda net: partial(run, net))


def by_tree(shares: Sequence[int], skips: bool) -> list[Bits]:
    groups, num = Groups(Mesh(("sample",), (len(shares),))), sum(shares)
    passes = max(shares) if skips else shares[groups.rank]  # those beyond a rank's share do not count
    start = sum(shares[: groups.rank])

    def run(net: nn.Module, reducer: TreeReducer, first: int) -> None:
        for index in range(first + start, first + start + passes):
            microbatch(net, index, num, skips)
        reducer.finish()

    def begin(net: nn.Module) -> Callable[[int], object]:
        options = {"sample_axes": (0,), "shares": shares, "passes": passes, "sizes": SMALL}
        return partial(run, net, TreeReducer([(p, (0,)) for p in net.parameters()], groups, **options))

    return updated(num, begin)


def by_backend(shares: Sequence[int]) -> list[Bits]:
    def run(net: nn.Module, reducer: GradientReducer, first: int) -> None:
        start = first + sum(shares[: dist.get_rank()])
        with reducer.paused():
            for index in range(start, start + shares[dist.get_rank()]):
                microbatch(net, index, sum(shares))
        reducer.reduce()

    return updated(sum(shares), lambda net: partial(run, net, reducer_of(net)), 1)


SHARES: list[list[tuple[int, ...]]] = [
    [(4, 4), (3, 5), (0, 8), (3, 2), (1, 0)],
    [(3, 3, 2), (2, 2, 1), (0, 1, 0)],
    [(2, 2, 2, 2), (1, 0, 4, 3), (1, 2, 1, 1)],
]


def each_share(shares: list[tuple[int, ...]], is_parallel: bool) -> list[list[Bits]]:
    ways = [(share, bool(number % 2)) for number, share in enumerate(shares)]
    return [by_tree(share, skips) if is_parallel else alone(sum(share), skips) for share, skips in ways]


@pytest.mark.parametrize("shares", SHARES)
def test_bits_do_not_depend_on_who_computes_what(shares: list[tuple[int, ...]]) -> None:
    (want,) = run_ranks(each_share, 1, shares, False)
    assert run_ranks(each_share, len(shares[0]), shares, True) == [want] * len(shares[0])
    if len(shares[0]) == 3:  # the control: another order shows in the bits
        assert run_ranks(by_backend, 3, shares[0])[0][0] != want[0][0]
