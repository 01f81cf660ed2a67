"""Collectives of every dtype, small and large, even and uneven, against what the ranks' tensors say."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from convoy.comm import collectives
from convoy.comm.collectives import gather_ints, time_limit
from convoy.comm.groups import Groups, everyone, temporary
from convoy.comm.joining import leave
from convoy.plans.mesh import Mesh
from ranks import run_ranks

LIMIT = timedelta(seconds=17)


def _of(rank, *shape, dtype=torch.float64):
    """The tensor of a rank: whole numbers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, shape, generator=generator).to(dtype)


def _through(transport):
    """Say through what this rank sends from now on."""
    os.environ["CONVOY_SHARED_MEMORY"] = "1" if transport == "memory" else "0"


def _even(dtype, transport):
    _through(transport)
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    for shape in [(), (0,), (3,), (5, 2), (70_000,), (3, 200_001)]:
        everyones = torch.stack([_of(r, *shape, dtype=dtype) for r in range(ranks)])
        x = everyones[rank].clone()
        assert collectives.all_reduce(x, group) is x and torch.equal(x, everyones.sum(0).to(dtype))
        pending = collectives.start_all_reduce(y := everyones[rank].clone(), group)
        assert pending.wait() is y and torch.equal(y, x)
        assert torch.equal(collectives.all_gather(everyones[rank], group), everyones)
        rows = torch.stack([_of(10 * rank + r, *shape, dtype=dtype) for r in range(ranks)])
        columns = torch.stack([_of(10 * r + rank, *shape, dtype=dtype) for r in range(ranks)])
        assert torch.equal(collectives.all_to_all(rows, group), columns)
        assert torch.equal(collectives.reduce_scatter(rows, group), columns.sum(0).to(dtype))
        z = collectives.broadcast(everyones[rank].clone(), group, source=1)
        assert torch.equal(z, everyones[1])


TRANSPORTS = pytest.mark.parametrize("transport", ["memory", "gloo"])


def _uneven(dtype, scale, transport):
    _through(transport)
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()

    def shape(sender, receiver):
        keeps = dtype is not torch.bfloat16  # something of its own
        return None if sender == receiver and not keeps else (sender, scale * (1 + receiver) + 1)

    sends = [shape(rank, r) and _of(10 * rank + r, *shape(rank, r), dtype=dtype).t() for r in range(ranks)]
    shapes = [shape(r, rank) and shape(r, rank)[::-1] for r in range(ranks)]
    found = collectives.exchange(sends, shapes, group)
    for sender, piece in enumerate(found):
        if shape(sender, rank) is None:
            assert piece.shape == (0,)
        else:
            assert torch.equal(piece, _of(10 * sender + rank, *shape(sender, rank), dtype=dtype).t())
    assert collectives.gather_ints([rank, 7], group) == [[r, 7] for r in range(ranks)]


def _into(transport, sizes):
    """Every rank sends `sizes[sender][receiver]` numbers."""
    _through(transport)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sends = [_of(10 * rank + r, sizes[rank][r]) for r in range(ranks)]
    receives = [torch.full((sizes[r][rank],), -99.0, dtype=torch.float64) for r in range(ranks)]
    found = collectives.start_exchange_into(sends, receives, dist.group.WORLD).wait()
    assert found is receives[rank - 1]
    for sender, piece in enumerate(receives):
        assert torch.equal(piece, _of(10 * sender + rank, sizes[sender][rank]) if sender != rank else piece.fill_(-99))


def _mixed(transport):
    _through(transport)
    group, rank = dist.group.WORLD, dist.get_rank()
    part = dist.new_group([0, 1])
    for number in range(60):
        x = _of(rank, 1 + 997 * number % 3000)
        everyones = [_of(r, len(x)) for r in range(3)]
        pending = collectives.start_all_reduce(x.clone(), group)
        assert torch.equal(collectives.all_gather(x, group), torch.stack(everyones))
        if rank < 2:
            assert torch.equal(collectives.all_reduce(x.clone(), part), everyones[0] + everyones[1])
        assert torch.equal(pending.wait(), sum(everyones))


def _bits(transport):
    """Sums of all sizes have the same bits on every rank."""
    _through(transport)
    found = []
    for count in (1, 1000, 10_000, 200_000, 1_000_003):
        x = torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank()))
        found.append(collectives.all_reduce(x, dist.group.WORLD))
    return found


@TRANSPORTS
@pytest.mark.parametrize("world", [2, 3])
def test_every_collective_gives_what_the_ranks_tensors_say(world, transport):
    for dtype in (torch.float64, torch.bfloat16, torch.int64)[world - 2 :]:
        run_ranks(_even, world, dtype, transport)
        run_ranks(_uneven, world, dtype, 1, transport)
        run_ranks(_uneven, world, dtype, 150_000, transport)


@TRANSPORTS
def test_collectives_of_other_sizes_and_kinds_after_one_another(transport):
    run_ranks(_into, 3, transport, [[3, 0, 900_000], [0, 1, 0], [5, 300_000, 0]])  # in unlike numbers of rounds
    run_ranks(_into, 2, transport, [[0, 0], [700_000, 0]])
    run_ranks(_mixed, 3, transport)
    first, *others = run_ranks(_bits, 3, transport)
    assert all(all(map(torch.equal, first, other)) for other in others), "sums have the same bits on every rank"


def test_one_rank_alone():
    x = torch.randn(3)
    assert collectives.size(None) == 1
    assert collectives.all_reduce(x, None) is x and collectives.broadcast(x, None) is x
    assert torch.equal(collectives.all_gather(x, None), x[None])
    assert torch.equal(collectives.all_to_all(x[None], None), x[None])
    assert torch.equal(collectives.reduce_scatter(x[None], None), x)
    assert torch.equal(collectives.exchange([x], [(3,)], None)[0], x)
    assert collectives.gather_ints([4, 2], None) == [[4, 2]]


def _compiled():
    group, rank = dist.group.WORLD, dist.get_rank()

    def run(x):
        y = collectives.all_reduce(x * 1, group)
        y = y + collectives.all_gather(x, group).sum(0)
        y = y + collectives.reduce_scatter(torch.stack([x, 2 * x]), group)
        first, second = collectives.exchange([x[: rank + 1], x[: rank + 1]], [(1,), (2,)], group)
        return y + first.sum() + second.sum()

    x = _of(rank, 4)
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))


@pytest.mark.slow
def test_the_private_functional_collectives_of_torch_are_still_there():
    run_ranks(_compiled, 2, timeout=120)


def _numbers_of_gpus():
    """As with `init_process_group("nccl")`: all ranks have joined for tensors of GPUs alone; profilings come and go."""
    place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("cuda:gloo", timeout=LIMIT, **place)
    rank, known, found = dist.get_rank(), [], []
    for _ in range(3):
        with temporary():
            groups = Groups(Mesh(("a", "b"), (2, 2)))
            numbers = [gather_ints([rank], group) for group in (everyone(), groups.of((0,)), groups.of((0, 1)))]
        numbers += [gather_ints([rank], dist.group.WORLD), gather_ints([rank], everyone())]
        assert all(time_limit(group) == LIMIT for group in dist.distributed_c10d._world.pg_map)
        del groups
        found.append(numbers)
        known.append(len(dist.distributed_c10d._world.pg_map))
    assert known == [2, 2, 2], "all ranks, and one group beside"
    assert found[0] == found[1] == found[2]
    dist.barrier(everyone())
    leave()
    return found[0]


def test_numbers_of_ranks_with_gpus_travel_between_cpus():
    """And leave no groups behind."""
    every = [[0], [1], [2], [3]]
    for rank, found in enumerate(run_ranks(_numbers_of_gpus, 4, join=False)):
        assert found == [every, [[rank % 2], [2 + rank % 2]], every, every, every]
