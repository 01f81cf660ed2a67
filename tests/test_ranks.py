"""The processes that tests run on: what they return, and what is told of those that fail."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from ranks import RankFailed, run_ranks


def _sum(scale):
    x = torch.ones(1) * (dist.get_rank() + scale)
    dist.all_reduce(x)
    return x


def _fail(rank, how):
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("as asked")
        if how == "hang":
            time.sleep(60)
        os._exit(3)
    if how != "hang":
        dist.barrier()


def _variables():
    return os.environ["RANK"], dist.is_initialized()


def test_every_rank_runs_with_its_own_number_after_a_failure_too():
    assert run_ranks(_variables, 2, join=False) == [("0", False), ("1", False)]
    assert "RANK" not in os.environ
    with pytest.raises(RankFailed, match=r"(?s)rank 1 failed.*as asked"):
        run_ranks(_fail, 2, 1, "raise")
    for world in (2, 3, 2):
        assert run_ranks(_sum, world, 1.0) == [sum(range(1, world + 1))] * world


@pytest.mark.slow
def test_hanging_and_dead_ranks_are_named():
    with pytest.raises(RankFailed, match=r"(?s)on 2 ranks.*rank 1 did not.*_fail"):
        run_ranks(_fail, 2, 1, "hang", timeout=2)
    with pytest.raises(RankFailed, match="rank 0 died with exit status 3"):
        run_ranks(_fail, 2, 0, "die")
