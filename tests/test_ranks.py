import importlib
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


def _fail(rank):
    if dist.get_rank() == rank:
        raise ValueError("as asked")
    dist.barrier()


def _hang():
    if dist.get_rank() == 1:
        time.sleep(60)


def _die():
    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


def _variables():
    return os.environ["RANK"], dist.is_initialized()


def test_every_rank_runs_with_its_own_number():
    for world in (2, 3, 2):
        assert run_ranks(_sum, world, 1.0) == [sum(range(1, world + 1))] * world


def test_a_failing_rank_is_named_and_the_next_run_works():
    with pytest.raises(RankFailed, match=r"(?s)rank 1 failed.*as asked"):
        run_ranks(_fail, 2, 1)
    assert run_ranks(_sum, 2, 0.0) == [1, 1]


@pytest.mark.slow
def test_hanging_and_dead_ranks_are_named():
    with pytest.raises(RankFailed, match=r"(?s)on 2 ranks.*rank 1 did not.*_hang"):
        run_ranks(_hang, 2, timeout=2)
    with pytest.raises(RankFailed, match="rank 0 died with exit status 3"):
        run_ranks(_die, 2)


def test_without_joining_only_the_variables_are_set():
    assert run_ranks(_variables, 2, join=False) == [("0", False), ("1", False)]
    assert "RANK" not in os.environ


@pytest.mark.slow
def test_the_time_to_load_a_module_is_not_counted(tmp_path, monkeypatch):
    """Nor that to start a process: where many do so, it is longer than a test."""
    lines = ["import multiprocessing, time", "if multiprocessing.parent_process() is not None:", "    time.sleep(4)"]
    (tmp_path / "loads_slowly.py").write_text("\n".join([*lines, "def one():", "    return 1", ""]))
    monkeypatch.syspath_prepend(tmp_path)
    loads_slowly = importlib.import_module("loads_slowly")
    assert run_ranks(loads_slowly.one, 2, timeout=3, join=False) == [1, 1]
