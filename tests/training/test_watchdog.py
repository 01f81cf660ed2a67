"""What is said of a run in which nothing moves."""

import os
import time

import pytest

from convoy.engine.groups import join, leave, meeting_store
from convoy.engine.position import Position
from convoy.training.devices import Devices
from convoy.training.watchdog import Seen, Watchdog, explain
from ranks import run_ranks


def seen(update: int = 6, collective: str = "", silent_s: float = 0.0, host: str = "a", part: str = "forward") -> Seen:
    return Seen(host, update, part, "conv1", collective, 31.0, 3, silent_s)


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
def test_the_one_who_holds_the_others_up_is_named(others: dict[int, Seen], words: str) -> None:
    found = explain(0, {0: seen(collective="exchange"), **others}, 31.0, 5.0, 2)
    where = "update 7, forward pass of layer conv1, waiting for other ranks (exchange)"
    assert found.startswith(f"rank 0 on host a has not moved for 31 s (--timeout): {where}, {words}last positions:\n")
    assert len(found.splitlines()) == 4


def test_a_rank_that_others_wait_for_says_so() -> None:
    found = explain(1, {0: seen(collective="wait"), 1: seen(part="data")}, 31.0, 5.0, 2)
    assert "update 7, waiting for data of layer conv1, and the others wait for it" in found


def stand_still(rank: int) -> list[str]:
    """One rank moves no more, the other waits for it."""
    join()
    said: list[str] = []
    devices, position = Devices.join()[0], Position(part="data")
    if devices.rank != rank:
        position.collective = "wait"
    with Watchdog(devices, meeting_store(), said.append, 0.5, position):
        until = time.monotonic() + 20
        while not said and time.monotonic() < until:
            time.sleep(0.05)
        devices.barrier()
    leave()
    return said


def test_every_rank_says_where_all_are() -> None:
    for said in run_ranks(stand_still, 2, 1, join=False):
        assert "rank 1" in said[0] and "rank 0" in said[0]
        assert "waiting for data" in said[0]


def keep_moving() -> list[str]:
    join()
    said: list[str] = []
    position = Position()
    with Watchdog(Devices.join()[0], meeting_store(), said.append, 0.5, position):
        for _ in range(40):
            time.sleep(0.05)
            position.moved = time.monotonic()
    leave()
    return said


def test_nothing_is_said_of_a_run_that_moves() -> None:
    assert run_ranks(keep_moving, 2, join=False) == [[], []]


def test_alone_nobody_watches() -> None:
    with Watchdog(Devices(), None, lambda sentence: os._exit(1), 0.01):
        time.sleep(0.3)
