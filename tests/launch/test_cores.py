"""Ranks of a machine have cores of their own."""

import os
import subprocess
import sys

import pytest

from convoy.errors import ConvoyError
from convoy.launch import cores


@pytest.mark.parametrize(
    ("num_ranks", "per_device", "want"),
    [
        (2, None, [[0, 1, 2], [3, 4, 5]]),
        (4, None, [[0], [1], [2], [3]]),
        (2, 1, [[0], [1]]),
        (8, None, [[0], [1], [2], [3], [4], [5], [0], [1]]),
    ],
)
def test_shares(num_ranks: int, per_device: int | None, want: list[list[int]]) -> None:
    assert [cores.share(range(6), num_ranks, place, per_device) for place in range(num_ranks)] == want


def test_too_few_cores_are_refused() -> None:
    with pytest.raises(ConvoyError, match="--cores-per-device 4 on 2 devices needs 8 cores, but here are 6"):
        cores.share(range(6), 2, 0, 4)


@pytest.mark.parametrize(
    ("said", "want"),
    [
        ([("here", [0, 1, 2, 3]), ("here", [0, 1, 2, 3])], [2, 3]),
        ([("there", [0, 1, 2, 3]), ("here", [0, 1, 2, 3])], [0, 1, 2, 3]),
        ([("here", [4, 5]), ("here", [0, 1, 2, 3])], [0, 1, 2, 3]),
    ],
    ids=["shared", "another machine", "its own already"],
)
def test_a_rank_takes_its_share(
    monkeypatch: pytest.MonkeyPatch, said: list[tuple[str, list[int]]], want: list[int]
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    monkeypatch.setattr(cores, "own_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(cores, "pin", lambda own: None)
    assert cores.take_share(lambda own: said, 1, None) == want


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_all_threads_are_pinned() -> None:
    code = (
        "import os, threading, time\n"
        "from convoy.launch import cores\n"
        "found = []\n"
        "go = threading.Event()\n"
        "thread = threading.Thread(target=lambda: (go.wait(), found.append(os.sched_getaffinity(0))))\n"
        "thread.start()\n"
        "own = cores.own_cores()[:1]\n"
        "cores.pin(own); go.set(); thread.join()\n"
        "assert found == [set(own)] == [os.sched_getaffinity(0)], found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_ranks_that_take_turns_are_told() -> None:
    assert cores.in_turns(2, 2) is None
    assert cores.in_turns(4, 2) == "4 devices share 2 cores and compute in turns: that is no faster than 2"
    assert cores.in_turns(2, 1) == "2 devices share one core and compute in turns: that is no faster than one"


@pytest.mark.parametrize(
    ("pinned", "ranks", "allowed", "share"),
    [(False, 1, 16.0, 16.0), (False, 4, 16.0, 4.0), (True, 4, 64.0, 16.0), (False, 4, 4.0, 1.0), (True, 4, 4.0, 1.0)],
)
def test_ranks_share_cores_and_a_quota(
    monkeypatch: pytest.MonkeyPatch, pinned: bool, ranks: int, allowed: float, share: float
) -> None:
    monkeypatch.setattr(cores, "own_cores", lambda: list(range(16)))
    monkeypatch.setattr(cores, "cores_allowed", lambda: allowed)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.delenv(cores.PINNED, raising=False)
    if pinned:
        monkeypatch.setenv(cores.PINNED, "0-15")
    assert cores.own_share() == share
