"""Collectives of every dtype, small and large, even and uneven, through memory, gloo and NCCL, against what the ranks'
tensors say."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from convoy.comm import collectives
from convoy.comm.shared_memory import SWITCH
from ranks import run_ranks


def _of(rank, *shape, dtype=torch.float64):
    """The tensor of a rank: whole numbers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, shape, generator=generator).to(dtype)


def _even(dtype, group):
    ranks, rank = group.size(), group.rank()
    for shape in [(), (0,), (3,), (5, 2), (70_000,), (3, 200_001)]:
        everyones = torch.stack([_of(r, *shape, dtype=dtype) for r in range(ranks)])
        x = everyones[rank].clone()
        assert collectives.all_reduce(x, group) is x and torch.equal(x, everyones.sum(0).to(dtype))
        pending = collectives.start_all_reduce(y := everyones[rank].clone(), group)
        assert pending.wait() is y and torch.equal(y, x)
        assert torch.equal(collectives.all_gather(everyones[rank], group), everyones)
        rows = torch.stack([_of(10 * rank + r, *shape, dtype=dtype) for r in range(ranks)])
        columns = torch.stack([_of(10 * r + rank, *shape, dtype=dtype) for r in range(ranks)])
        assert torch.equal(collectives.reduce_scatter(rows, group), columns.sum(0).to(dtype))
        z = collectives.broadcast(everyones[rank].clone(), group, source=1)
        assert torch.equal(z, everyones[1])


def _uneven(dtype, scale, group):
    ranks, rank = group.size(), group.rank()

    def shape(sender, receiver):
        keeps = dtype is not torch.bfloat16  # something of its own
        return None if sender == receiver and not keeps else (sender, scale * (1 + receiver) + 1)

    sends = [shape(rank, r) and _of(10 * rank + r, *shape(rank, r), dtype=dtype).t() for r in range(ranks)]
    shapes = [shape(r, rank) and shape(r, rank)[::-1] for r in range(ranks)]
    for sender, piece in enumerate(collectives.exchange(sends, shapes, group)):
        if shape(sender, rank) is None:
            assert piece.shape == (0,)
        else:
            assert torch.equal(piece, _of(10 * sender + rank, *shape(sender, rank), dtype=dtype).t())
    assert collectives.gather_ints([rank, 7], group) == [[r, 7] for r in range(ranks)]


def _into(sizes, group):
    """Every rank sends `sizes[sender][receiver]` numbers."""
    ranks, rank = group.size(), group.rank()
    sends = [_of(10 * rank + r, sizes[rank][r]) for r in range(ranks)]
    receives = [torch.full((sizes[r][rank],), -99.0, dtype=torch.float64) for r in range(ranks)]
    assert collectives.start_exchange_into(sends, receives, group).wait() is receives[rank - 1]
    for sender, piece in enumerate(receives):
        assert torch.equal(piece, _of(10 * sender + rank, sizes[sender][rank]) if sender != rank else piece.fill_(-99))


SIZES = {2: [[0, 0], [700_000, 0]], 3: [[3, 0, 900_000], [0, 1, 0], [5, 300_000, 0]]}  # in unlike numbers of rounds


def _everything():
    """Every collective by every way; sums of all sizes, which have the same bits on every rank."""
    sums = []
    for shared in "10":
        os.environ[SWITCH] = shared
        group = dist.new_group()
        assert (collectives._channel(torch.ones(1), group) is not None) == (shared == "1")
        for dtype in (torch.float64, torch.bfloat16, torch.int64)[group.size() - 2 :]:
            _even(dtype, group)
            _uneven(dtype, 1, group)
            _uneven(dtype, 150_000, group)
        _into(SIZES[group.size()], group)
        for count in (1, 1000, 10_000, 200_000, 1_000_003):
            x = torch.randn(count, generator=torch.Generator().manual_seed(group.rank()))
            sums.append(collectives.all_reduce(x, group))
    return sums


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_collective_gives_what_the_ranks_tensors_say(world):
    first, *others = run_ranks(_everything, world, timeout=120)
    assert all(all(map(torch.equal, first, other)) for other in others)


DEVICE = os.environ.get("CONVOY_TEST_DEVICE", "cuda:0")  # cpu tries the test itself, over gloo
ON_ONE_RANK = {
    "all_reduce": lambda x, group: collectives.all_reduce(x.clone(), group),
    "all_gather": lambda x, group: collectives.all_gather(x, group)[0],
    "exchange": lambda x, group: collectives.exchange([x], [x.shape], group)[0],
    "reduce_scatter": lambda x, group: collectives.reduce_scatter(x[None], group),
    "broadcast": lambda x, group: collectives.broadcast(x.clone(), group),
}


def _over_nccl():
    """Check every collective on one rank, with sizes and types that differ."""
    dist.init_process_group("gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl")
    with mock.patch.object(collectives, "_channel", lambda x, group: None):  # which one rank alone has not
        for name, run in ON_ONE_RANK.items():
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                for shape in [(5, 3), (0, 3)]:
                    x = torch.arange(torch.Size(shape).numel(), device=DEVICE).view(shape).to(dtype)
                    y = run(x, dist.group.WORLD)
                    assert y.dtype == dtype and torch.equal(y, x), (name, dtype, shape)
    dist.destroy_process_group()


@pytest.mark.skipif(DEVICE != "cpu" and not torch.cuda.is_available(), reason="torch sees no CUDA device here")
def test_collectives_of_one_rank_over_nccl():
    run_ranks(_over_nccl, 1, join=False)
