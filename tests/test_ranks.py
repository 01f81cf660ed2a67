"""The processes that tests run on: what they return, and what is told of those that fail."""

import os

import pytest
import torch
import torch.distributed as dist

from ranks import RankFailed, run_ranks


def _sum(scale):
    x = torch.ones(1) * (dist.get_rank() + scale)
    dist.all_reduce(x)
    return x


def _fail(rank):
    if dist.get_rank() == rank:
        raise ValueError("as asked")
    dist.barrier()


def _variables():
    return os.environ["RANK"], dist.is_initialized()


def test_every_rank_runs_with_its_own_number_after_a_failure_too():
    assert run_ranks(_variables, 2, join=False) == [("0", False), ("1", False)]
    assert "RANK" not in os.environ
    with pytest.raises(RankFailed, match=r"(?s)rank 1 failed.*as asked"):
        run_ranks(_fail, 2, 1)
    for world in (2, 3, 2):
        assert run_ranks(_sum, world, 1.0) == [sum(range(1, world + 1))] * world
