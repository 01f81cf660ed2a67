"""What is said of a run in which nothing moves, on hosts and on GPUs that wait for each other, and of a slow rank."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import stuck
from convoy.comm.collectives import all_reduce
from convoy.comm.groups import Groups
from convoy.comm.joining import join, leave, meeting_store
from convoy.comm.position import Ledger, Position, current, ledger
from convoy.comm.ranks import Ranks
from convoy.launch.host import HostLoad, HostWatch, OtherProcess
from convoy.plans.mesh import Mesh
from convoy.training import watchdog as module
from convoy.training.division import Division, divide
from convoy.training.environment import join_ranks
from convoy.training.watchdog import SlowRanks, Watchdog
from ranks import run_ranks


def watched(kind: str, limit_s: float = 600.0) -> list[str]:
    """What this rank says where rank 1 (`data`) or 0 stands still, moves, waits, or has a broken device."""
    join()
    said, began = list[str](), time.monotonic()
    ranks, first = join_ranks()[0], dist.get_rank() == 0
    position, to_wait = Position(part="data"), Ledger()

    def broken() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    if kind == "broken" and first:
        to_wait.add("group", lambda: [0, 1], "all reduce", broken)
    if (kind == "data" and first) or (kind in ("works", "set up", "begun") and not first):
        position.collective = "wait"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LIMIT_S", limit_s)
        with Watchdog(ranks, meeting_store(), said.append, 0.5, position, given=to_wait) as watchdog:
            if kind != "set up":
                watchdog.begin()
            while time.monotonic() - began < (2 if kind in ("works", "set up") else 20):
                time.sleep(0.05)
                if kind == "works" and first:
                    position.moved = time.monotonic()
                if said and kind not in ("works", "set up"):
                    break
            ranks.barrier()
    leave()
    return said


def test_every_rank_says_where_all_are() -> None:
    for said in run_ranks(watched, 2, "data", join=False):
        assert "rank 1" in said[0] and "rank 0" in said[0] and "waiting for data" in said[0]
    assert all("has not moved for" in said[0] for said in run_ranks(watched, 2, "broken", join=False))


@pytest.mark.slow
def test_who_waits_for_one_that_moves_or_is_being_set_up_is_left_alone() -> None:
    for kind in ("works", "set up"):
        assert run_ranks(watched, 2, kind, join=False) == [[], []]
    assert all(run_ranks(watched, 2, "begun", join=False))
    works, waits = run_ranks(watched, 2, "set up", 1.0, join=False)
    assert works == [] and "(--timeout)" not in waits[0] and "waiting for other ranks" in waits[0]


@pytest.mark.parametrize("late", [None, lambda: "process 7, which is stopped, has not delivered a/1.png"])
def test_alone_only_data_are_watched(late: Callable[[], str] | None) -> None:
    """A computation of one device may take as long as it takes: compiling does."""
    ledger.clear()  # of tests before, in this process
    said: list[str] = []
    with Watchdog(Ranks(), None, said.append, 0.3, Position(update=6, part="data", late=late)) as watchdog:
        watchdog.begin()
        time.sleep(1)
    assert bool(said) == (late is not None)
    for sentence in said:
        assert sentence.startswith("nothing has moved for ")
        assert "update 7, waiting for data (process 7, which is stopped, has not delivered a/1.png); see" in sentence


# GPUs, which hosts do not notice: whose fault it is follows from what each was given


def stand_still() -> list[str]:
    """Rank 2 does not begin the all-reduce of the third layer; what this rank says when nothing has moved for long."""
    stuck.join(60)
    ranks, said = Ranks.here(), list[str]()
    groups = Groups(Mesh(("a", "b"), (2, 2)))
    assert dist.group.WORLD is not None
    with Watchdog(ranks, dist.group.WORLD.get_group_store(), said.append, 3.0) as watchdog:
        watchdog.begin()
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
    firsts = ["".join(said[:1]).partition("\n")[0] for said in run_ranks(stand_still, 4, join=False)]
    missing = "which has not begun all reduce number 3 of layer conv2"
    assert "waiting for other ranks (all reduce number 3 of layer conv2 on" in firsts[0]  # partner on the first axis
    assert "held up by rank 2 on host" in firsts[0] and missing in firsts[0]
    assert f"{missing}: the others wait for it" in firsts[2] and all("rank 2" in each for each in firsts)


# Which rank is called slow, and when


def test_a_rank_that_stays_slow_is_named_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    even, one, more = divide((1,) * 6, 3), [1.0, 2.0, 1.0], divide((1,) * 6, 3, (1, 4, 1))

    def named(parts: list[int], division: Division, *seconds: list[float]) -> list[int]:
        """The stretches in which somebody is named, where ranks have these parts of the batch."""
        ranks = Ranks()
        of_parts = [(part, "abc"[rank % 3]) for rank, part in enumerate(parts)]
        monkeypatch.setattr(ranks, "gather", lambda value: of_parts if isinstance(value, tuple) else [None] * 6)
        judge = SlowRanks(ranks)
        said = [judge.look(each, 20, 2.5 * max(each), division) for each in seconds]
        assert all(" ms of an update, " in sentence for sentence in said if sentence)
        return [number for number, sentence in enumerate(said, 1) if sentence]

    assert named([0, 1, 2], even, *[one] * 13) == [3, 6, 12]
    assert named([0, 1, 2], even, *[one, one, [1.0] * 3] * 6) == []
    assert named([0, 1, 2], more, *[[1.0, 4.0, 1.0]] * 9) == []  # it was given more
    # Only ranks in the same place of their groups are compared, and of stages those of one stage.
    assert named([0, 0, 1, 1, 2, 2], even, *[[1.0, 3.0, 1.0, 3.0, 1.0, 3.0]] * 6) == []
    assert named([0, 0, 1, 1, 2, 2], even, *[[1.0, 3.0, 2.0, 3.0, 1.0, 3.0]] * 6) == [3, 6]


def test_who_keeps_a_slow_rank_from_its_cores_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    of_parts = [(0, "a"), (1, "b")]
    monkeypatch.setattr(ranks := Ranks(), "gather", lambda x: of_parts if isinstance(x, tuple) else [x, None])
    stress, halves = (OtherProcess("stress", 4711, 1.5),), divide((1, 1), 2)
    load = HostLoad(1.0, 1.0, 2, None, None, stress, 1.5, 0.0, 0, None, None)
    monkeypatch.setattr(HostWatch, "read", lambda watch: load)
    judge, said = SlowRanks(ranks), ""
    for _ in range(3):
        said = judge.look([2.0, 1.0], 20, 5.0, halves) or ""
    assert said.endswith("; other processes there keep 1.5 of 2 cores busy, stress (process 4711) most")
    judge.look([1.0, 1.0], 20, 5.0, halves)
    assert judge._watch is None  # nobody is slow any more
