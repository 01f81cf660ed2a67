"""bf16 gradients and local SGD: other numbers than the exact run's, and near them."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from convoy.comm.groups import Groups
from convoy.engine.gradients import GradientReducer, LocalSgd, Sizes
from convoy.plans.mesh import Mesh
from ranks import run_ranks

SMALL = Sizes(alone=400, bucket=200, first=64)
UPDATES = 40


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 20, generator=generator)
    return x, (x[:, :4].argmax(1) + 2 * (x[:, 4] > 0).long()) % 4


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 4))


def train(kind: str) -> tuple[float, Tensor]:
    """Loss over all data at the end, and the weights."""
    net = make()
    x, y = data()
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = Groups(Mesh(("sample",), (world,)))
    own = slice(64 * rank // world, 64 * (rank + 1) // world)
    local = None
    if kind == "local":
        local = LocalSgd(list(net.parameters()), groups, (0,), every=4, weight=own.stop - own.start)
    else:
        compress = torch.bfloat16 if kind == "bf16" else None
        GradientReducer([(p, (0,)) for p in net.parameters()], groups, sizes=SMALL, compress=compress)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    averaged = 0
    for update in range(UPDATES):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x[own]), y[own])
        (loss if local else loss * ((own.stop - own.start) / 64)).backward()
        optimizer.step()
        averaged += local.step(update) if local else 0
    if local:
        assert averaged == UPDATES // 4
        local.average()
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    return nn.functional.cross_entropy(net(x), y).item(), weights


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bf16", "local"])
def test_approximations_differ_and_learn_as_well(kind: str) -> None:
    exact = run_ranks(train, 3, "exact", timeout=30)
    approximate = run_ranks(train, 3, kind, timeout=30)
    serial = run_ranks(train, 1, "exact", timeout=30)[0]
    assert torch.allclose(exact[0][1], serial[1], atol=1e-5)
    assert all(torch.equal(weights, approximate[0][1]) for _, weights in approximate)
    assert (approximate[0][1] - exact[0][1]).abs().max() > 1e-4
    assert abs(approximate[0][0] - exact[0][0]) < (0.01 if kind == "bf16" else 0.1)
