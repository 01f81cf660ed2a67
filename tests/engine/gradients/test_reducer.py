"""Gradients after `backward()` are those of the global batch, whatever a rank has or has not to send."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from convoy.comm.groups import Groups
from convoy.engine.gradients import GradientReducer, Sizes
from convoy.engine.gradients.buckets import flat, start_gather
from convoy.plans.mesh import Mesh
from ranks import run_ranks

SAMPLES = 7
SMALL = Sizes(alone=400, bucket=200, first=64)


class Net(nn.Module):
    """Large and small parameters, one that is used by some ranks only, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.GroupNorm(2, 8)
        self.hidden = nn.Linear(8 * 16, 24)
        self.out = nn.Linear(24, 5)
        self.sometimes = nn.Linear(24, 5)
        self.never = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor, sometimes: bool = False) -> Tensor:
        x = self.hidden(self.norm(self.conv(x)).relu().flatten(1)).relu()
        return self.out(x) + self.sometimes(x) if sometimes else self.out(x)


def make() -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    return Net().double(), torch.randn(SAMPLES, 3, 4, 4).double(), torch.randint(0, 5, (SAMPLES,))


def shares(world: int) -> list[slice]:
    """Uneven; the last of four ranks has nothing."""
    ends = {1: [0, 7], 2: [0, 5, 7], 3: [0, 4, 5, 7], 4: [0, 3, 6, 7, 7]}[world]
    return [slice(a, b) for a, b in pairwise(ends)]


def loss_of(net: Net, x: Tensor, y: Tensor, sometimes: bool = False) -> Tensor:
    """This rank's part of the mean over the global batch."""
    return nn.functional.cross_entropy(net(x, sometimes), y, reduction="sum") / SAMPLES


def grads(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


def difference(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> float:
    assert {n for n, g in a.items() if g is None} == {n for n, g in b.items() if g is None}
    pairs = [(g, b[name]) for name, g in a.items() if g is not None]
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs if y is not None)


def reducer_of(net: nn.Module, world: int, **options: object) -> GradientReducer:
    groups = Groups(Mesh(("sample",), (world,)))
    options.setdefault("sizes", SMALL)
    return GradientReducer([(p, (0,)) for p in net.parameters()], groups, **options)  # type: ignore[arg-type]


Scenario = Callable[[Net, Tensor, Tensor, GradientReducer | None], None]


def once(net: Net, x: Tensor, y: Tensor, reducer: GradientReducer | None) -> None:
    loss_of(net, x, y).backward()


def three_steps(net: Net, x: Tensor, y: Tensor, reducer: GradientReducer | None) -> None:
    for step in range(3):
        net.zero_grad(set_to_none=step != 1)
        loss_of(net, x, y).backward()


def twice(net: Net, x: Tensor, y: Tensor, reducer: GradientReducer | None) -> None:
    """Adds to gradients that were reduced already."""
    loss_of(net, x, y).backward()
    loss_of(net, x * 2, y, sometimes=True).backward()
    loss_of(net, x * 3, y).backward()


def auxiliary(net: Net, x: Tensor, y: Tensor, reducer: GradientReducer | None) -> None:
    """Two losses of one graph, the second of a few parameters only."""
    loss = loss_of(net, x, y)
    loss.backward(retain_graph=True)
    (net.conv.weight.square().sum() / (1 if reducer is None else reducer_world(reducer))).backward()
    (loss * 2).backward()


def accumulated(net: Net, x: Tensor, y: Tensor, reducer: GradientReducer | None) -> None:
    loss_of(net, x, y).backward()
    with nullcontext() if reducer is None else reducer.paused():
        loss_of(net, x * 2, y, sometimes=True).backward()
        loss_of(net, x * 3, y).backward()
    loss_of(net, x * 4, y).backward()


def accumulated_and_reduced(net: Net, x: Tensor, y: Tensor, reducer: GradientReducer | None) -> None:
    if reducer is None:
        loss_of(net, x, y).backward()
        return
    with reducer.paused():
        loss_of(net, x, y).backward()
    reducer.reduce()


def dropped(net: Net, x: Tensor, y: Tensor, reducer: GradientReducer | None) -> None:
    loss_of(net, x, y).backward()
    with nullcontext() if reducer is None else reducer.paused():
        loss_of(net, x * 2, y, sometimes=True).backward()
    net.zero_grad()
    loss_of(net, x * 4, y).backward()


def checkpointed(net: Net, x: Tensor, y: Tensor, reducer: GradientReducer | None) -> None:
    """Backward passes inside a backward pass, each of which ends by itself."""
    x = x.clone().requires_grad_()
    for _ in range(2):
        h = checkpoint(lambda x: net.norm(net.conv(x)).relu().flatten(1), x, use_reentrant=True)
        h = checkpoint(lambda h: net.hidden(h).relu(), h, use_reentrant=True)
        (nn.functional.cross_entropy(net.out(h), y, reduction="sum") / SAMPLES).backward()


SCENARIOS = {
    s.__name__: s
    for s in (once, three_steps, twice, auxiliary, accumulated, accumulated_and_reduced, dropped, checkpointed)
}


def reducer_world(reducer: GradientReducer) -> int:
    return reducer._groups.mesh.num_devices


def run_scenario(name: str, scatter: bool) -> float:
    world = dist.get_world_size()
    net, x, y = make()
    serial = copy.deepcopy(net)
    SCENARIOS[name](serial, x, y, None)
    reducer = reducer_of(net, world, scatter=scatter)
    mine = shares(world)[dist.get_rank()]
    SCENARIOS[name](net, x[mine], y[mine], reducer)
    if scatter:  # every rank has its piece of the large ones
        for i, parameter in enumerate(reducer.parameters):
            if reducer.scattered(i) and parameter.grad is not None:
                start_gather(flat(parameter.grad), reducer.group(i)).wait()
    return difference(grads(net), grads(serial))


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SCENARIOS)
def test_gradients_are_those_of_the_global_batch(name: str, world: int, scatter: bool) -> None:
    assert max(run_ranks(run_scenario, world, name, scatter, timeout=30)) < 1e-12


def unweighted() -> float:
    world = dist.get_world_size()
    net, x, y = make()
    serial = copy.deepcopy(net)
    once(serial, x, y, None)
    reducer_of(net, world)
    mine = shares(world)[dist.get_rank()]
    (nn.functional.cross_entropy(net(x[mine]), y[mine]) / world).backward()
    return difference(grads(net), grads(serial))


def test_a_plain_mean_of_uneven_shares_is_noticed() -> None:
    assert min(run_ranks(unweighted, 2, timeout=30)) > 1e-3


def used_by_some() -> tuple[float, bool]:
    rank, world = dist.get_rank(), dist.get_world_size()
    net, x, y = make()
    serial = copy.deepcopy(net)
    reducer_of(net, world)
    worst = 0.0
    for step in range(3):
        loss = torch.zeros(())
        for r, part in enumerate(shares(world)):
            loss = loss + loss_of(serial, x[part], y[part], sometimes=r == step)
        serial.zero_grad()
        net.zero_grad()
        loss.backward()
        mine = shares(world)[rank]
        loss_of(net, x[mine], y[mine], sometimes=rank == step).backward()
        worst = max(worst, difference(grads(net), grads(serial)))
    return worst, net.never.grad is None


def test_a_parameter_that_one_rank_uses() -> None:
    for worst, none in run_ranks(used_by_some, 3, timeout=30):
        assert worst < 1e-12
        assert none


def broken_off() -> str:
    net, x, y = make()
    reducer_of(net, dist.get_world_size())

    def fail(gradient: Tensor) -> None:
        raise ValueError("as asked")

    handle = net.conv.weight.register_hook(fail)
    try:
        loss_of(net, x, y).backward()
    except ValueError:
        handle.remove()
    try:
        loss_of(net, x, y).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_pass_after_one_that_broke_off_is_refused() -> None:
    assert all("broke off" in text for text in run_ranks(broken_off, 2, timeout=30))
