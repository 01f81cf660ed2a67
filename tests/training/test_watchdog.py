"""What is said of a run in which nothing moves."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.checkpoint.store import CheckpointStore
from convoy.comm.joining import join, leave, meeting_store
from convoy.comm.position import Ledger, Position, ledger
from convoy.comm.ranks import Ranks
from convoy.training import watchdog as module
from convoy.training.environment import join_ranks
from convoy.training.watchdog import RankState, Watchdog, explain
from ranks import run_ranks
from tiny import write_mnist
from whole_runs import as_before, train_here


def seen(
    update: int = 6, collective: str = "", silent_s: float = 0.0, host: str = "a", part: str = "forward"
) -> RankState:
    return RankState(host, update, part, "conv1", collective, 31.0, 3, silent_s)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({1: seen(host="b", silent_s=29)}, "held up by rank 1 on host b, not heard of any more\n"),
        ({1: seen(host="b")}, "held up by rank 1 on host b\n"),
        ({1: seen(collective="wait")}, "while all wait for each other\n"),
        ({1: seen(update=5, collective="wait")}, "while all wait for each other, rank 1 on host a behind the others\n"),
        ({}, "held up by rank 1, not heard of any more\n"),
    ],
)
def test_the_one_who_holds_the_others_up_is_named(others: dict[int, RankState], words: str) -> None:
    found = explain(0, {0: seen(collective="exchange"), **others}, 31.0, 5.0, 2)
    where = "update 7, forward pass of layer conv1, waiting for other ranks (exchange)"
    assert found.startswith(f"rank 0 on host a has not moved for 31 s (--timeout): {where}, {words}last positions:\n")
    assert len(found.splitlines()) == 4


def test_a_rank_that_others_wait_for_says_so() -> None:
    found = explain(1, {0: seen(collective="wait"), 1: seen(part="data")}, 31.0, 5.0, 2)
    assert "update 7, waiting for data of layer conv1, and the others wait for it" in found


def test_stages_are_named() -> None:
    waiting = replace(seen(part="backward", collective="value of another stage"), stage=1)
    found = explain(0, {0: waiting, 1: replace(seen(host="b", silent_s=29), stage=2)}, 31.0, 5.0, 2)
    where = "update 7, backward pass of layer conv1, waiting for other ranks (value of another stage)"
    assert found.startswith(
        f"rank 0 (stage 1) on host a has not moved for 31 s (--timeout): {where}, held up by rank 1 ("
    )
    assert "held up by rank 1 (stage 2) on host b, not heard of any more\n" in found
    assert "\n  rank 1 (stage 2) on host b: update 7" in found


def stand_still(rank: int) -> list[str]:
    """One rank moves no more, the other waits for it."""
    join()
    said: list[str] = []
    ranks, position = join_ranks()[0], Position(part="data")
    if ranks.rank != rank:
        position.collective = "wait"
    with Watchdog(ranks, meeting_store(), said.append, 0.5, position):
        until = time.monotonic() + 20
        while not said and time.monotonic() < until:
            time.sleep(0.05)
        ranks.barrier()
    leave()
    return said


def test_every_rank_says_where_all_are() -> None:
    for said in run_ranks(stand_still, 2, 1, join=False):
        assert "rank 1" in said[0] and "rank 0" in said[0]
        assert "waiting for data" in said[0]


@pytest.mark.parametrize(
    ("part", "words"),
    [("start", "before the first update"), ("reading", "reading a checkpoint"), ("weights", "writing the weights")],
)
def test_what_is_no_part_of_an_update_has_no_number(part: str, words: str) -> None:
    found = explain(0, {0: seen(collective="barrier"), 1: seen(part=part)}, 31.0, 5.0, 2, "")
    assert found.startswith("rank 0 on host a has not moved for 31 s: update 7, forward pass of layer conv1, waiting")
    assert f"rank 1 on host a: {words} (for 31 s)" in found


def wait_for_one_that_works(works: bool) -> list[str]:
    join()
    said: list[str] = []
    ranks = join_ranks()[0]
    position = Position(part="data", collective="barrier" if ranks.rank else "")
    with Watchdog(ranks, meeting_store(), said.append, 0.5, position):
        for _ in range(60):
            time.sleep(0.05)
            if works and ranks.rank == 0:
                position.moved = time.monotonic()
    leave()
    return said


@pytest.mark.slow
def test_who_waits_for_one_that_moves_is_left_alone() -> None:
    assert run_ranks(wait_for_one_that_works, 2, True, join=False) == [[], []]
    assert all(run_ranks(wait_for_one_that_works, 2, False, join=False))


def be_set_up(begins: bool, limit_s: float) -> list[str]:
    """Rank 0 works on its own for long, rank 1 waits for it."""
    join()
    said: list[str] = []
    ranks = join_ranks()[0]
    position = Position(collective="barrier" if ranks.rank else "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LIMIT_S", limit_s)
        with Watchdog(ranks, meeting_store(), said.append, 0.3, position, patient=True) as watchdog:
            if begins:
                watchdog.begin()
            time.sleep(2)
    leave()
    return said


@pytest.mark.slow
def test_while_a_run_is_set_up_only_those_who_wait_end() -> None:
    assert run_ranks(be_set_up, 2, False, 600.0, join=False) == [[], []]
    works, waits = run_ranks(be_set_up, 2, False, 0.6, join=False)
    assert works == []
    assert "(--timeout)" not in waits[0] and "before the first update, waiting for other ranks" in waits[0]
    assert all(run_ranks(be_set_up, 2, True, 600.0, join=False))


def held_up(data: Path, out: Path, where: str) -> str:
    """Rank 0 does not come back from reading, or writing, until both have said so."""
    said: list[str] = []
    ranks, _ = join_ranks()

    def say(sentence: str) -> None:
        said.append(sentence)
        (out.parent / f"said-{ranks.rank}").touch()

    def sleep() -> None:
        until = time.monotonic() + 40
        while time.monotonic() < until and not all((out.parent / f"said-{rank}").exists() for rank in range(2)):
            time.sleep(0.05)

    class Sleeping(CheckpointStore):
        def load_latest(self, identity: str) -> tuple:
            sleep()
            return super().load_latest(identity)

    def save_late(*args: object) -> None:
        sleep()
        save(*args)

    running = sys.modules["convoy.training.run"]
    save = running.save_weights
    with as_before() as patch, Watchdog(ranks, meeting_store(), say, 3.0, patient=True) as watchdog:
        if ranks.rank == 0 and where == "reading":
            patch.setattr(sys.modules["convoy.training.loop"], "CheckpointStore", Sleeping)
        if ranks.rank == 0 and where == "weights":
            patch.setattr(running, "save_weights", save_late)
        train_here(data, out, {"epochs": "3ba"}, where == "reading", watchdog=watchdog)
    leave()
    return said[0]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "words"), [("reading", "reading a checkpoint"), ("weights", "writing the weights")])
def test_a_rank_that_stays_away_before_or_after_the_updates_is_named(tmp_path: Path, where: str, words: str) -> None:
    data = write_mnist(tmp_path / "data")
    if where == "reading":
        run_ranks(train_here, 2, data, tmp_path / "run", {"epochs": "3ba"})
    held, waiting = run_ranks(held_up, 2, data, tmp_path / "run", where, timeout=100, join=False)
    assert f"(--timeout): {words}, and the others wait for it" in held
    assert f"{words}, waiting for other ranks" in waiting and "held up by rank 0 on host" in waiting
    assert (tmp_path / "run" / "weights.safetensors").exists()


def keep_moving() -> list[str]:
    join()
    said: list[str] = []
    position = Position()
    with Watchdog(join_ranks()[0], meeting_store(), said.append, 0.5, position):
        for _ in range(40):
            time.sleep(0.05)
            position.moved = time.monotonic()
    leave()
    return said


@pytest.mark.slow
def test_nothing_is_said_of_a_run_that_moves() -> None:
    assert run_ranks(keep_moving, 2, join=False) == [[], []]


def hold_a_broken_device() -> list[str]:
    """Rank 0's device fails, and so does asking what it is through with."""
    join()
    said: list[str] = []
    ranks, given = join_ranks()[0], Ledger()

    def broken() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    if ranks.rank == 0:
        given.add("group", lambda: [0, 1], "all reduce", broken)
    with Watchdog(ranks, meeting_store(), said.append, 0.5, Position(part="data"), given=given):
        until = time.monotonic() + 20
        while not said and time.monotonic() < until:
            time.sleep(0.05)
        ranks.barrier()
    leave()
    return said


def test_a_device_that_has_failed_does_not_end_the_watch() -> None:
    assert all("has not moved for" in said[0] for said in run_ranks(hold_a_broken_device, 2, join=False))


@pytest.mark.parametrize("late", [None, lambda: "process 7, which is stopped, has not delivered a/1.png"])
def test_alone_only_data_are_watched(late: Callable[[], str] | None) -> None:
    """A computation of one device may take as long as it takes: compiling does."""
    ledger.clear()  # of tests before, in this process
    said: list[str] = []
    with Watchdog(Ranks(), None, said.append, 0.3, Position(update=6, part="data", late=late)):
        time.sleep(1)
    assert bool(said) == (late is not None)
    for sentence in said:
        assert sentence.startswith("nothing has moved for ")
        assert "update 7, waiting for data (process 7, which is stopped, has not delivered a/1.png); see" in sentence
