"""Sums over microbatches have the same bits on any number of ranks and with any shares."""

import hashlib
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from convoy.comm.groups import Groups
from convoy.engine.gradients.reducer import GradientReducer
from convoy.engine.gradients.tree import TreeReducer
from convoy.plans.buckets import Sizes
from convoy.plans.mesh import Mesh
from ranks import run_ranks

SMALL = Sizes(alone=400, bucket=200, first=64)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
    head = [nn.Linear(128, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 5), nn.Linear(5, 5)]
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), *head)


def backward(net: nn.Sequential, microbatch: int, number: int, skip_last: bool) -> None:
    generator = torch.Generator().manual_seed(microbatch)
    x = torch.randn(3, 3, 4, 4, generator=generator)
    y = torch.randint(0, 5, (3,), generator=generator)
    out = net[:7](x) if skip_last or microbatch % 2 else net(x)
    (nn.functional.cross_entropy(out, y) / number).backward()


def digest(net: nn.Module) -> str:
    found = hashlib.sha256()
    for name, p in net.named_parameters():
        if p.grad is not None:
            found.update(name.encode() + p.grad.contiguous().numpy().tobytes())
    return found.hexdigest()


def tree_sum(leaves: list[torch.Tensor | None]) -> torch.Tensor | None:
    """As the module says it: the largest power of two below the number of leaves on the left."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    left, right = tree_sum(leaves[:half]), tree_sum(leaves[half:])
    return right if left is None else left if right is None else left + right


def serial(number: int, skip_last: bool) -> list[str]:
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    digests = []
    for step in range(2):
        leaves = []
        for i in range(number):
            optimizer.zero_grad()
            backward(net, step * number + i, number, skip_last)
            leaves.append([p.grad for p in net.parameters()])
        for p, *gradients in zip(net.parameters(), *leaves, strict=True):
            p.grad = tree_sum(gradients)
        digests.append(digest(net))
        optimizer.step()
    return digests


def parallel(shares: Sequence[int], skip_last: bool) -> list[str]:
    net = make()
    groups = Groups(Mesh(("sample",), (len(shares),)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    rank, number = groups.rank, sum(shares)
    passes = max(shares) if skip_last else shares[rank]  # those beyond a rank's share do not count
    reducer = TreeReducer(
        [(p, (0,)) for p in net.parameters()], groups, sample_axes=(0,), shares=shares, passes=passes, sizes=SMALL
    )
    first = sum(shares[:rank])
    digests = []
    for step in range(2):
        optimizer.zero_grad()
        for i in range(first, first + passes):
            backward(net, step * number + i, number, skip_last)
        reducer.finish()
        digests.append(digest(net))
        optimizer.step()
    return digests


SHARES: list[list[tuple[int, ...]]] = [
    [(4, 4), (3, 5), (0, 8), (3, 2), (1, 0)],
    [(3, 3, 2), (2, 2, 1), (0, 1, 0)],
    [(2, 2, 2, 2), (1, 0, 4, 3), (1, 2, 1, 1)],
]


def each(function: str, shares: list[tuple[int, ...]]) -> list[list[str]]:
    calls = {"serial": lambda share, skip: serial(sum(share), skip), "parallel": parallel}
    return [calls[function](share, bool(number % 2)) for number, share in enumerate(shares)]


@pytest.mark.parametrize("shares", SHARES)
def test_bits_do_not_depend_on_who_computes_what(shares: list[tuple[int, ...]]) -> None:
    (want,) = run_ranks(each, 1, "serial", shares)
    assert run_ranks(each, len(shares[0]), "parallel", shares) == [want] * len(shares[0])


def summed_by_the_backend(shares: Sequence[int]) -> str:
    net = make()
    groups = Groups(Mesh(("sample",), (len(shares),)))
    reducer = GradientReducer([(p, (0,)) for p in net.parameters()], groups, sizes=SMALL)
    first = sum(shares[: groups.rank])
    with reducer.paused():
        for i in range(first, first + shares[groups.rank]):
            backward(net, i, sum(shares), False)
    reducer.reduce()
    return digest(net)


def test_another_order_shows_in_the_bits() -> None:
    assert run_ranks(summed_by_the_backend, 3, (3, 3, 2))[0] != run_ranks(serial, 1, 8, False)[0][0]
