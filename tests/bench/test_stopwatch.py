"""Parts of an update, by a clock that the test moves."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from convoy.bench import measurement as module
from convoy.bench.measurement import Stopwatch
from convoy.bench.records import COMMUNICATION, INPUT, OPTIMIZER
from convoy.comm.collectives import waits


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def take(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_what_lies_inside_counts_once(clock: Clock) -> None:
    watch = Stopwatch(torch.device("cpu"))
    watch.lap()
    with watch.section(INPUT):
        clock.take(1)
    clock.take(10)
    with watch.section(OPTIMIZER):
        clock.take(2)
        with watch.section(COMMUNICATION):
            clock.take(3)
            with watch.section(COMMUNICATION):
                clock.take(4)
            clock.take(5)
        clock.take(6)
    watch.lap()
    clock.take(7)
    watch.lap()
    assert watch.times() == {"seconds": [31, 7], INPUT: [1, 0], OPTIMIZER: [8, 0], COMMUNICATION: [12, 0]}


def test_a_cleared_watch_has_no_laps(clock: Clock) -> None:
    watch = Stopwatch(torch.device("cpu"))
    watch.lap()
    watch.lap()
    watch.clear()
    watch.lap()
    clock.take(2)
    watch.lap()
    assert watch.times()["seconds"] == [2]


def test_waits_and_optimizers_are_seen(clock: Clock) -> None:
    @waits
    def collective() -> None:
        clock.take(3)

    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: clock.take(5))
    watch = Stopwatch(torch.device("cpu"))
    with watch.watch():
        watch.lap()
        collective()
        layer(torch.ones(1)).sum().backward()
        optimizer.step()
        watch.lap()
    collective()
    optimizer.step()
    times = watch.times()
    assert (times[COMMUNICATION], times["seconds"]) == ([3], [8])
    assert times[OPTIMIZER] in ([0], [5])  # torch may call an optimizer's own hook before or after


def test_its_own_cost_is_known() -> None:
    watch = Stopwatch(torch.device("cpu"))
    watch.lap()
    for _ in range(100):
        with watch.section(INPUT):
            pass
    watch.lap()
    began = time.perf_counter()
    assert 0 < watch.overhead < 1
    assert time.perf_counter() - began < 5
