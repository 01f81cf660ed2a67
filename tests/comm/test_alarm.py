"""One rank fails in what all try together, over a backend that notices nothing: all know why, and soon."""

import os
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import stuck
from convoy.comm import alarm as module
from convoy.comm import groups
from convoy.comm.collectives import all_reduce
from convoy.comm.groups import Groups
from convoy.comm.joining import leave
from convoy.comm.position import current
from convoy.comm.ranks import Ranks
from convoy.errors import RankFailedError
from convoy.plans.mesh import Mesh
from ranks import run_ranks

MESH = Mesh(("a", "b"), (2, 2))
LIMIT_S = 8.0
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.02 GiB is free."
)


def failing(when: str, alarm: bool) -> tuple[str, bool, float, int]:
    """Rank 2 lacks memory; what this rank then knows, after how many seconds, and how many ranks still talk."""
    stuck.join(LIMIT_S)
    ranks = Ranks.here()

    def work(meanwhile: Ranks) -> None:
        if when == "before the groups are made" and ranks.rank == 2:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        made = Groups(MESH)
        for number in range(2):
            current.at(f"conv{number}#1")
            if number == 1 and ranks.rank == 2:
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)
            for axis in (0, 1):
                all_reduce(torch.ones(1 << 20), made.of((axis,)))
        stuck.synchronize()  # until the other one comes, or the groups are aborted
        if when == "while others talk":
            meanwhile.barrier()

    began = time.monotonic()
    with mock.patch.object(module, "only_gloo", lambda: not alarm):
        try:
            ranks.trying("profiling sample=4", work)
        except RankFailedError as error:
            return str(error), error.out_of_memory, time.monotonic() - began, len(ranks.gather(0))
        finally:
            leave()
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("when", ["before the groups are made", "while others wait", "while others talk"])
def test_all_ranks_know_soon_who_lacks_memory_and_what_needs_less(when: str) -> None:
    layer = "" if when == "before the groups are made" else ", in layer conv1"
    for said, out_of_memory, took_s, talking in run_ranks(failing, 4, when, True, join=False):
        assert said == (
            f"rank 2 ran out of memory while profiling sample=4{layer}: it asked for 2.00 GiB where 1.02 GiB of "
            "79.10 GiB were free; smaller microbatches, a plan over more devices or --precision bf16 need less"
        )
        assert out_of_memory and talking == 4
        assert took_s < LIMIT_S


@pytest.mark.slow
def test_without_the_key_they_wait_for_the_limit() -> None:
    """The negative control."""
    found = run_ranks(failing, 4, "while others wait", False, join=False)
    assert max(took_s for _, _, took_s, _ in found) > LIMIT_S


def failing_to_connect() -> tuple[str, float]:
    """Rank 2 lacks memory for its first connection; what this rank then knows, and after how many seconds."""
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=4, timeout=limit)
    ranks = Ranks.here()

    def connect(group: dist.ProcessGroup) -> None:
        if ranks.rank == 2:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        if 2 in dist.get_process_group_ranks(group):
            all_reduce(torch.ones(1), group)

    began = time.monotonic()
    with mock.patch.object(groups, "connect", connect), pytest.raises(RankFailedError) as raised:
        ranks.trying("profiling sample=4", lambda meanwhile: Groups(MESH))
    return str(raised.value), time.monotonic() - began


def test_no_rank_waits_for_the_group_of_another_one_that_failed_to_connect() -> None:
    """Ranks 1 and 3 have connected their first group meanwhile, and would wait in the store to make the next."""
    for said, took_s in run_ranks(failing_to_connect, 4, join=False):
        assert said.startswith("rank 2 ran out of memory while profiling sample=4")
        assert took_s < LIMIT_S
