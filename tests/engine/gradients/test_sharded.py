"""Optimizer state divided over ranks gives the steps, and the saved state, of the whole."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from convoy.comm.groups import Groups
from convoy.engine.gradients import GradientReducer, ShardedOptimizer, Sizes, global_norm, sharding_pays
from convoy.errors import ConvoyError
from convoy.plans.mesh import Mesh
from convoy.training.optimizers import LarsConfig, create_optimizer
from ranks import run_ranks

SMALL = Sizes(alone=400, bucket=200, first=64)
OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "adamw": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "adagrad": (optim.Adagrad, {"lr": 0.1}),
}


def make(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 7, 3, padding=1).to(memory_format=torch.channels_last),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(7 * 16, 23),
        nn.ReLU(),
        nn.Linear(23, 5),
        nn.Linear(5, 5),
    ).to(dtype)


def backward(net: nn.Sequential, step: int, own: slice, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 3, 4, 4, generator=generator).to(dtype)
    y = torch.randint(0, 5, (12,), generator=generator)
    nn.functional.cross_entropy(net[:6](x[own]), y[own], reduction="sum").div(12).backward()


def optimizer_of(net: nn.Module, name: str) -> optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    flat = [p for p in net.parameters() if p.ndim == 1]
    return kind([{"params": [p for p in net.parameters() if p.ndim > 1]}, {"params": flat, "lr": 0.05}], **options)


def reducer_of(net: nn.Module, scatter: bool) -> GradientReducer:
    groups = Groups(Mesh(("sample",), (dist.get_world_size(),)))
    return GradientReducer([(p, (0,)) for p in net.parameters()], groups, sizes=SMALL, scatter=scatter)


def train(net: nn.Sequential, optimizer: optim.Optimizer, steps: range, dtype: torch.dtype) -> list[Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    own = slice(12 * rank // world, 12 * (rank + 1) // world)
    for step in steps:
        optimizer.zero_grad()
        backward(net, step, own, dtype)
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def largest_difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(a, b, strict=True))


def compare(name: str, dtype: torch.dtype) -> tuple[float, bool, int]:
    net = make(dtype)
    twin = copy.deepcopy(net)
    reducer = reducer_of(net, scatter=True)
    optimizer = ShardedOptimizer(optimizer_of(net, name), reducer)
    mine = train(net, optimizer, range(4), dtype)
    reducer_of(twin, scatter=False)
    whole = train(twin, optimizer_of(twin, name), range(4), dtype)
    kept = sum(
        v.numel() for s in optimizer._inner.state.values() for v in s.values() if isinstance(v, Tensor) and v.ndim
    )
    return largest_difference(mine, whole), all(torch.equal(x, y) for x, y in zip(mine, whole, strict=True)), kept


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_weights_are_those_of_the_whole_optimizer(name: str) -> None:
    for world in (2, 3):
        results = run_ranks(compare, world, name, torch.float64, timeout=30)
        assert max(error for error, _, _ in results) < 1e-12


def test_on_two_ranks_they_are_bitwise_equal() -> None:
    assert all(same for _, same, _ in run_ranks(compare, 2, "sgd", torch.float32, timeout=30))


def test_each_rank_keeps_its_part_of_the_state() -> None:
    kept = [number for _, _, number in run_ranks(compare, 3, "sgd", torch.float64, timeout=30)]
    large, small = 7 * 27 + 112 * 23 + 23 * 5, 7 + 23 + 5
    assert sum(kept) == large + 3 * small
    assert max(kept) - min(kept) <= 3


def save(name: str, sharded: bool) -> tuple[dict[str, Any], list[Tensor], list[Tensor]]:
    """The state after two steps, the weights then and after four."""
    net = make(torch.float64)
    reducer = reducer_of(net, scatter=sharded)
    optimizer = optimizer_of(net, name)
    optimizer = ShardedOptimizer(optimizer, reducer) if sharded else optimizer
    half = train(net, optimizer, range(2), torch.float64)
    state = copy.deepcopy(optimizer.state_dict())
    return state, half, train(net, optimizer, range(2, 4), torch.float64)


def go_on(name: str, sharded: bool, state: dict[str, Any], half: list[Tensor]) -> list[Tensor]:
    net = make(torch.float64)
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), half, strict=True):
            parameter.copy_(value)
    reducer = reducer_of(net, scatter=sharded)
    optimizer = optimizer_of(net, name)
    optimizer = ShardedOptimizer(optimizer, reducer) if sharded else optimizer
    optimizer.load_state_dict(state)
    return train(net, optimizer, range(2, 4), torch.float64)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_is_that_of_the_whole_and_loads_anywhere(name: str) -> None:
    plain, _, end = run_ranks(save, 1, name, False, timeout=30)[0]
    saved = run_ranks(save, 3, name, True, timeout=30)
    for state, _, _ in saved:
        assert state["state"].keys() == plain["state"].keys()
        for index, entries in plain["state"].items():
            for key, value in entries.items():
                assert torch.allclose(torch.as_tensor(state["state"][index][key]), torch.as_tensor(value), rtol=1e-10)
        assert state["param_groups"] == plain["param_groups"]
    state, half, _ = saved[0]
    for world, sharded in ((1, False), (2, True)):
        for weights in run_ranks(go_on, world, name, sharded, state, half, timeout=30):
            assert largest_difference(weights, end) < 1e-12


def norm_of_pieces() -> float:
    net, twin = make(torch.float64), make(torch.float64)
    reducer = reducer_of(net, scatter=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    backward(net, 0, slice(12 * rank // world, 12 * (rank + 1) // world), torch.float64)
    backward(twin, 0, slice(0, 12), torch.float64)
    own = reducer.own_gradients()
    terms = [own.get(p, (p.grad, ())) for p in net.parameters() if p.grad is not None]
    norm = global_norm(terms, Groups(Mesh(("sample",), (world,))))
    want = nn.utils.get_total_norm([p.grad for p in twin.parameters() if p.grad is not None])
    return abs(float(norm / want - 1))


def test_the_norm_of_divided_gradients() -> None:
    assert max(run_ranks(norm_of_pieces, 3, timeout=30)) < 1e-12


def refused() -> str:
    net = make(torch.float32)
    try:
        ShardedOptimizer(create_optimizer(net, LarsConfig(name="lars", lr=1), 1.0), reducer_of(net, scatter=True))
    except ConvoyError as error:
        return str(error)
    return ""


def test_lars_is_refused() -> None:
    assert all("LARS cannot be divided" in text for text in run_ranks(refused, 2, timeout=30))


def pays(numbers: list[int], name: str) -> bool:
    groups = Groups(Mesh(("sample",), (dist.get_world_size(),)))
    parameters = [nn.Parameter(torch.zeros(1).expand(number, 1000)) for number in numbers]
    own = [nn.Parameter(torch.zeros(2))]
    config = LarsConfig(name="lars", lr=1)
    optimizer = create_optimizer(nn.ParameterList(own), config, 1.0) if name == "lars" else optim.SGD(own, lr=1)
    return sharding_pays(optimizer, [(parameter, (0,)) for parameter in parameters], groups)


@pytest.mark.parametrize(
    ("world", "numbers", "name", "want"),
    [
        (2, [38_000, 17_000, 4_000], "sgd", True),
        (1, [38_000, 17_000, 4_000], "sgd", False),
        (2, [38_000, 17_000, 4_000], "lars", False),
        (2, [2_400, 2_400, 1_200], "sgd", False),
        (2, [60] * 1000, "sgd", False),
    ],
)
def test_dividing_pays_where_large_tensors_are_many(world: int, numbers: list[int], name: str, want: bool) -> None:
    assert run_ranks(pays, world, numbers, name, timeout=30) == [want] * world
