"""Gradients after `backward()` are those of the global batch, whatever a rank has or has not to send."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from convoy.comm.groups import Groups
from convoy.engine.gradients import GradientReducer, LocalSgd, Sizes
from convoy.engine.gradients.backward import BackwardWatch, at_end_of_backward
from convoy.engine.gradients.buckets import flat, is_dense, laid_out, shaped, start_gather
from convoy.plans.buckets import Item, plan_buckets
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
    return GradientReducer([(p, (0,)) for p in net.parameters()], groups, **options)


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


def scenarios() -> dict[Any, float]:
    found, world = {}, dist.get_world_size()
    for name in SCENARIOS:
        for scatter in (False, True):
            net, x, y = make()
            serial = copy.deepcopy(net)
            SCENARIOS[name](serial, x, y, None)
            reducer = reducer_of(net, world, scatter=scatter)
            mine = shares(world)[dist.get_rank()]
            SCENARIOS[name](net, x[mine], y[mine], reducer)
            for i, parameter in enumerate(reducer.parameters) if scatter else ():
                if reducer.scattered(i) and parameter.grad is not None:  # each rank has its piece of the large ones
                    start_gather(flat(parameter.grad), reducer.group(i)).wait()
            found[name, scatter] = difference(grads(net), grads(serial))
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gradients_are_those_of_the_global_batch(world: int) -> None:
    for found in run_ranks(scenarios, world):
        assert max(found.values()) < 1e-12, found


def unweighted() -> float:
    """The negative control: a plain mean of uneven shares."""
    net, x, y = make()
    serial = copy.deepcopy(net)
    once(serial, x, y, None)
    reducer_of(net, 2)
    mine = shares(2)[dist.get_rank()]
    (nn.functional.cross_entropy(net(x[mine]), y[mine]) / 2).backward()
    return difference(grads(net), grads(serial))


def used_by_some() -> tuple[float, bool]:
    rank, world = dist.get_rank(), dist.get_world_size()
    net, x, y = make()
    serial, worst = copy.deepcopy(net), 0.0
    reducer_of(net, world)
    for step in range(3):
        serial.zero_grad()
        net.zero_grad()
        for r, part in enumerate(shares(world)):
            loss_of(serial, x[part], y[part], sometimes=r == step).backward()
        mine = shares(world)[rank]
        loss_of(net, x[mine], y[mine], sometimes=rank == step).backward()
        worst = max(worst, difference(grads(net), grads(serial)))
    return worst, net.never.grad is None


def test_a_parameter_that_one_rank_uses() -> None:
    assert all(worst < 1e-12 and none for worst, none in run_ranks(used_by_some, 3))
    assert min(run_ranks(unweighted, 2)) > 1e-3


def broken_off() -> str:
    net, x, y = make()
    reducer_of(net, dist.get_world_size())

    def fail(gradient: Tensor) -> None:
        raise ValueError("as asked")

    handle = net.conv.weight.register_hook(fail)
    with pytest.raises(ValueError, match="as asked"):
        loss_of(net, x, y).backward()
    handle.remove()
    with pytest.raises(RuntimeError) as caught:
        loss_of(net, x, y).backward()
    return str(caught.value)


def test_a_pass_after_one_that_broke_off_is_refused() -> None:
    assert all("broke off" in text for text in run_ranks(broken_off, 2))


def approximate(kind: str) -> tuple[float, Tensor]:
    """Loss over all data after 40 updates, and the weights."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 4))
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
    y = (x[:, :4].argmax(1) + 2 * (x[:, 4] > 0).long()) % 4
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = Groups(Mesh(("sample",), (world,)))
    own = slice(64 * rank // world, 64 * (rank + 1) // world)
    share, local = (own.stop - own.start) / 64, None
    if kind == "local":
        local = LocalSgd(list(net.parameters()), groups, (0,), every=4, weight=own.stop - own.start)
    else:
        compress = torch.bfloat16 if kind == "bf16" else None
        GradientReducer([(p, (0,)) for p in net.parameters()], groups, sizes=SMALL, compress=compress)
    optimizer, averaged = torch.optim.SGD(net.parameters(), lr=0.5), 0
    for update in range(40):
        optimizer.zero_grad()
        (nn.functional.cross_entropy(net(x[own]), y[own]) * (1 if local else share)).backward()
        optimizer.step()
        averaged += local.step(update) if local else 0
    if local:
        assert averaged == 40 // 4
        local.average()
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    return nn.functional.cross_entropy(net(x), y).item(), weights


def test_approximations_differ_from_the_exact_run_and_learn_as_well() -> None:
    exact, serial = run_ranks(approximate, 3, "exact"), run_ranks(approximate, 1, "exact")[0]
    assert torch.allclose(exact[0][1], serial[1], atol=1e-5)
    for kind, near in (("bf16", 0.01), ("local", 0.1)):
        found = run_ranks(approximate, 3, kind)
        assert all(torch.equal(weights, found[0][1]) for _, weights in found)
        assert (found[0][1] - exact[0][1]).abs().max() > 1e-4
        assert abs(found[0][0] - exact[0][0]) < near


def test_every_gradient_travels_once_with_its_own_kind() -> None:
    import random

    drawn = random.Random(0)
    for _ in range(200):
        items = [
            Item(
                axes=drawn.choice([(0,), (1,), (0, 1)]),
                dtype=drawn.choice([torch.float32, torch.float64]),
                device=torch.device("cpu"),
                numel=drawn.choice([0, 1, 10, 50, 200]),
            )
            for _ in range(drawn.randrange(1, 12))
        ]
        order = drawn.sample(range(len(items)), len(items))
        buckets = plan_buckets(items, order, Sizes(alone=700, bucket=300, first=100))
        for kind in ("members", "tally"):
            assert sorted(i for bucket in buckets for i in getattr(bucket, kind)) == list(range(len(items)))
        for bucket in buckets:
            assert len({items[i].kind for i in (*bucket.members, *bucket.tally)}) == 1
            assert {items[i].axes for i in bucket.members} <= {bucket.axes}
            assert bucket.alone == (len(bucket.members) == 1 and items[bucket.members[0]].bytes >= 700)
        last = [max((order.index(i) for i in bucket.members), default=len(order)) for bucket in buckets]
        assert last == sorted(last)


def test_dense_tensors_are_flat_without_a_copy_and_others_copied() -> None:
    for shape in [(2, 3, 4, 5), (7,), (3, 1, 2, 2), (0, 3), ()]:
        x = torch.randn(shape)
        for tensor in (x, x.to(memory_format=torch.channels_last) if x.ndim == 4 else x.t() if x.ndim == 2 else x):
            assert is_dense(tensor) and torch.equal(shaped(flat(tensor), tensor), tensor)
            assert flat(tensor).data_ptr() == tensor.data_ptr() and laid_out(tensor, tensor) is tensor
    x = torch.randn(4, 6)
    assert not is_dense(x[:, ::2]) and not is_dense(x[:1].expand(4, 6))
    gradient = laid_out(x.t().contiguous().t(), x)
    assert torch.equal(gradient, x) and gradient.is_contiguous()


def test_the_engine_tells_the_end_of_a_backward_pass() -> None:
    """torch's private `queue_callback`; without it, gradients could not be added by the end of `backward()`."""
    events: list[str] = []
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def after(i: int) -> None:
        events.append(f"after {i}")
        if len(events) < 4 and "queued" not in events:
            events.append("queued")
            at_end_of_backward(lambda: events.append("end"))

    watch = BackwardWatch([first, second], lambda i: events.append(f"before {i}"), after)
    (first.exp() * second).sum().backward()
    assert sorted(events[:-1]) == ["after 0", "after 1", "before 0", "before 1", "queued"] and events[-1] == "end"
    torch.autograd.grad((first * second).sum(), [first, second])
    watch.remove()
    (first * second).sum().backward()
    assert events[-1] == "end"
    events.clear()
    BackwardWatch([first], lambda i: events.append("before"), lambda i: events.append("after"))
    x = torch.ones(2, requires_grad=True)
    checkpoint(lambda x: x * first, x, use_reentrant=True).sum().backward()
    assert events == ["before", "after"]


def test_errors_at_the_end_of_backward_and_of_cast_parameters_are_raised_there() -> None:
    def fail() -> None:
        raise ValueError("as asked")

    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    BackwardWatch([first], lambda i: None, lambda i: at_end_of_backward(fail))
    with pytest.raises(ValueError, match="as asked"):
        first.sum().backward()
    BackwardWatch([second], lambda i: None, lambda i: None)
    second.data = second.data.double()
    with pytest.raises(RuntimeError, match="cast or moved"):
        second.sum().backward()
