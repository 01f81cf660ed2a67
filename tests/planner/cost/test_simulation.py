"""Timelines against what they come to by hand: streams, messages, hosts of devices."""

import random
from dataclasses import replace
from typing import Any

import pytest

from convoy.planner.cost.simulation import simulate
from convoy.plans.timeline import Task


def compute(
    seconds: float, *after: int, rank: int = 0, kind: Any = "forward", layer: str = "a", host: float = 0
) -> Task:
    return Task(rank, "compute", kind, layer, layer, seconds, after, host=host)


def message(
    seconds: float, *after: int, rank: int = 0, meeting: int = -1, share: float = 0.0, stream: Any = "gradients"
) -> Task:
    return Task(rank, stream, "gradient", "g", "g", seconds, after, meeting, share)


ENDS = {
    "a stream runs its tasks one after the other": ([compute(2), compute(3), compute(1)], [2, 5, 6]),
    "a task waits for what it needs": ([compute(2), message(5, 0), compute(1, 0), compute(1, 1)], [2, 7, 3, 8]),
    "messages of one stream queue": (
        [compute(1), message(3, 0), compute(1, 0), message(2, 2), compute(1, 1, 3)],
        [1, 4, 2, 6, 7],
    ),
    # a quarter for 4 s: 3 of 5 s are done at 4, the rest takes 2
    "a message takes cycles from what computes": ([message(4, share=0.25), compute(5)], [4, 6]),
    "one that takes the whole core hides nothing": ([compute(2), message(4, 0, share=1.0), compute(5, 0)], [2, 6, 11]),
    # half each: the short one is done at 4, and what is left of the long one at 5
    "two messages at once share the way": ([message(2, stream="transfers"), message(3)], [4, 5]),
    "and take no more cycles than one after the other": (
        [message(2, stream="transfers", share=0.5), message(2, share=0.5), compute(10)],
        [4, 4, 12],
    ),
    "a collective begins when the last rank is there": (
        [compute(1), compute(3, rank=1), message(2, 0, meeting=7), message(2, 1, rank=1, meeting=7)],
        [1, 3, 5, 5],
    ),
    # rank 1 has two messages at once for the first 2 s of the collective, so that both go at half speed
    "and is as slow as its slowest rank": (
        [message(4, meeting=0), message(4, rank=1, meeting=0), message(1, rank=1, stream="transfers")],
        [5, 5, 2],
    ),
    "what takes no time ends when it begins": ([compute(0), message(0, 0), compute(1, 1), compute(0)], [0, 0, 1, 1]),
}


def test_tasks_end_when_they_do_by_hand() -> None:
    for words, (tasks, ends) in ENDS.items():
        assert [span.end for span in simulate(tasks).spans] == pytest.approx(ends), words
    assert simulate([]).total == 0
    crossed = [message(1, rank=rank, meeting=meeting) for rank, meeting in ((0, 0), (0, 1), (1, 1), (1, 0))]
    for tasks in ([compute(1, 1), message(1, 0)], crossed):
        with pytest.raises(ValueError, match="wait for each other"):
            simulate(tasks)


def chain(kernels: list[tuple[float, float]]) -> list[Task]:
    """Kernels one after the other, by seconds of the host and of the device."""
    return [compute(device, layer=f"layer{number}", host=host) for number, (host, device) in enumerate(kernels)]


def period(kernels: list[tuple[float, float]], updates: int = 200) -> float:
    """Seconds from one update to the next after many, by the definition."""
    host = device = before = 0.0
    for _ in range(updates):
        before = device
        for issued, seconds in kernels:
            host += issued
            device = max(device, host) + seconds
    return device - before


def test_a_device_waits_for_a_host_that_is_slower() -> None:
    draws = random.Random(5)
    for _ in range(100):
        kernels = [(draws.choice([0.5, 1, 4]), draws.choice([0.25, 1, 6])) for _ in range(draws.randint(1, 12))]
        assert simulate(chain(kernels)).total == pytest.approx(period(kernels)), kernels
    kinds = simulate(chain([(3.0, 1.0)] * 10)).by_kind()
    assert (kinds["forward"], kinds["issuing"], kinds["idle"]) == pytest.approx((10, 20, 0))
    summary = simulate(chain([(3.0, 1.0)] * 4)).summary()  # part of the layer that waits, as events measure it
    assert summary.parts["forward"] == pytest.approx(12) and summary.parts["waiting"] == 0

    def rank(number: int, host: float) -> list[Task]:
        after = replace(message(1.0, 2 * number, rank=number, meeting=7, stream="transfers"), host=host)
        return [compute(2.0, rank=number, host=host), after]

    timeline = simulate(rank(0, 0.5) + rank(1, 5.0))  # ranks wait for the host of another
    assert timeline.total == pytest.approx(10) and timeline.by_kind(0)["exposed"] == pytest.approx(8)
