"""Processes of a visit: their places, and how they fail."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from convoy.errors import ConvoyError
from convoy.experiments.scaling.processes import RankFailed, Say, Seat, run_ranks


def seats(num: int) -> list[Seat]:
    return [Seat(rank, num) for rank in range(num)]


def place(factor: int, say: Say) -> tuple[int, list[int], int]:
    say("here", 1, 2)
    dist.init_process_group("gloo")
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return factor * int(x), sorted(os.sched_getaffinity(0)), torch.get_num_threads()


def test_ranks_have_places_and_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))
    own = [(cores[0],), (cores[-1],)]
    heard: list[tuple[str, int, int]] = []
    found = run_ranks(place, [Seat(rank, 2, own[rank]) for rank in range(2)], 10, say=lambda *what: heard.append(what))
    assert found == [(30, [cores[0]], 1), (30, [cores[-1]], 1)]
    assert heard == [("here", 1, 2)]


def mistake(say: Say) -> None:
    raise ConvoyError("the plan is wrong: mend it")


def error(say: Say) -> None:
    raise ZeroDivisionError("by nothing")


def killed(say: Say) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(say: Say) -> None:
    time.sleep(100)


def test_failures_have_reasons() -> None:
    with pytest.raises(ConvoyError, match="mend it"):
        run_ranks(mistake, seats(1))
    with pytest.raises(RankFailed, match="rank 0 failed: ZeroDivisionError: by nothing"):
        run_ranks(error, seats(1))
    with pytest.raises(RankFailed, match="rank 0 was ended by SIGKILL; the machine may be out of memory"):
        run_ranks(killed, seats(1))
    with pytest.raises(RankFailed, match="did not come back in time"):
        run_ranks(hang, seats(1), seconds=1.0)


def talk(say: Say) -> None:
    print("to the standard output", flush=True)
    print("to the standard error", file=sys.stderr, flush=True)


def test_the_standard_output_stays_clean(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(talk, seats(1))
    run_ranks(talk, seats(1), quiet=True)
    out, _ = capfd.readouterr()
    assert out == ""
