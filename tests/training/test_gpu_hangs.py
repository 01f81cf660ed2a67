"""GPUs that wait for each other, which hosts do not notice: whose fault it is follows from what each was given."""

import time

import pytest
import torch
import torch.distributed as dist

import stuck
from convoy.comm.collectives import all_reduce
from convoy.comm.groups import Groups
from convoy.comm.joining import leave
from convoy.comm.position import Ledger, current
from convoy.comm.ranks import Ranks
from convoy.plans.mesh import Mesh
from convoy.training.watchdog import RankState, Watchdog, explain
from ranks import run_ranks

MESH = Mesh(("a", "b"), (2, 2))


def stand_still(numbered: bool) -> list[str]:
    """Rank 2 does not begin the all-reduce of the third layer; what this rank says when nothing has moved for long."""
    stuck.join(60)
    ranks, said = Ranks.here(), list[str]()
    groups = Groups(MESH)
    given = {} if numbered else {"given": Ledger()}
    assert dist.group.WORLD is not None
    with Watchdog(ranks, dist.group.WORLD.get_group_store(), said.append, 3.0, **given):
        current.update = 6
        current.to("forward")
        for number in range(3):
            current.at(f"conv{number}")
            if not (ranks.rank == 2 and number == 2):
                all_reduce(torch.ones(1 << 20), groups.of((0,)))
        current.to("data" if ranks.rank == 2 else "rest")
        until = time.monotonic() + 20
        while not said and time.monotonic() < until:
            time.sleep(0.05)
        ranks.barrier()
    for group in stuck.groups():
        group.aborted = True
    leave()
    return said


def test_the_rank_that_has_not_begun_a_collective_is_named() -> None:
    found = ["".join(said[:1]) for said in run_ranks(stand_still, 4, True, join=False)]
    missing = "which has not begun all reduce number 3 of layer conv2"
    first = found[0].partition("\n")[0]  # rank 2's partner on the first axis
    assert (
        "update 7, between the parts of the update, waiting for other ranks (all reduce number 3 of layer conv2 on"
        in first
    )
    assert "held up by rank 2 on host" in first and missing in first
    assert f"{missing}: the others wait for it" in found[2].partition("\n")[0]
    assert all("rank 2" in one.partition("\n")[0] for one in found)


@pytest.mark.slow
def test_without_numbers_nobody_knows() -> None:
    """The negative control."""
    assert not any("has not begun" in one for said in run_ranks(stand_still, 4, False, join=False) for one in said)


def seen(count: int, *still: int, rank_of: tuple[int, ...] = (0, 1, 2, 3), others: dict | None = None) -> RankState:
    rows = [(number, "all reduce", f"conv{number}") for number in still]
    waits = f"all reduce number {still[0]} on the GPU" if still else ""
    return RankState("a", 6, "rest", "", waits, 31.0, 3, groups={"0": (list(rank_of), count, rows), **(others or {})})


def line(ranks: dict[int, RankState], own: int = 0) -> str:
    return explain(own, ranks, 31.0, 5.0, len(ranks)).partition("\n")[0]


def test_a_gpu_that_does_not_finish_what_others_have_is_named() -> None:
    ranks = {0: seen(7), 1: seen(7), 2: seen(7, 7), 3: seen(7)}
    assert line(ranks).endswith(
        "held up by rank 2 on host a, whose GPU does not finish all reduce number 7 of layer conv7"
    )


def test_who_waits_in_another_group_is_not_to_blame() -> None:
    """Rank 1 is behind in group 0 as it waits for rank 3 in group 1."""
    other = {"1": ([1, 3], 4, [(4, "exchange", "fc")])}
    ranks = {0: seen(7, 7), 1: seen(6, others=other), 2: seen(7, 7), 3: seen(7, 7, others={"1": ([1, 3], 3, [])})}
    ranks[3].groups["0"][2].clear()
    assert "held up by rank 3 on host a, which has not begun exchange number 4 of layer fc" in line(ranks)


def test_where_all_have_begun_all_wait_for_each_other() -> None:
    assert line({rank: seen(7, 7) for rank in range(4)}).endswith("while all wait for each other")
