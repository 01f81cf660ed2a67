"""A watched update as events: all of its time, one thing after the other, in the words of the prediction."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from convoy.engine.clock import DeviceClock
from convoy.engine.watched import WatchedUpdate
from convoy.planner.cost.trace import trace
from convoy.training.observation import middle_update


@dataclass
class Call:
    """Of a placement, as far as events want it."""

    name: str
    layer: str
    outputs: tuple[str, ...] = ()

    @property
    def call(self):
        return self


@dataclass
class Placement:
    calls: tuple


MARKS = [
    ("input", "", -1, 0.5),
    ("rest", "", -1, 0.25),
    ("forward", "", -1, 0.125),
    ("forward", "conv", 0, 1.0),
    ("rest", "", 0, 0.125),
    ("transfer", "", 0, 0.75),
    ("forward", "fc", 0, 2.0),
    ("rest", "", -1, 0.5),
    ("backward", "fc", 0, 3.0),
    ("copy", "fc", 0, 0.25),
    ("backward", "fc", 0, 0.125),
    ("transfer", "backward", 0, 0.5),
    ("backward", "conv", 0, 1.5),
    ("gradient", "", -1, 1.0),
    ("update", "", -1, 0.5),
    ("rest", "", -1, 0.25),
]
"""What begins, and how long it takes."""


def watched(placed: bool = True) -> WatchedUpdate:
    now = [0.0]
    update = WatchedUpdate(DeviceClock(torch.device("cpu"), lambda: now[0]))
    if placed:
        update.placements.append(Placement((Call("conv", "features.0"), Call("fc", "head"))))
    for kind, call, run, seconds in MARKS:
        update.mark(kind, call, run)
        now[0] += seconds
    update.mark("rest")
    return update


def test_events_are_the_update_from_its_beginning_to_its_end():
    update = watched()
    found = update.timeline(3).spans
    assert found[0].start == 0
    for one, after in itertools.pairwise(found):
        assert one.end == after.start
    total = sum(seconds for *_, seconds in MARKS)
    assert sum(one.end - one.start for one in found) == found[-1].end == total
    assert sum(segment.seconds for segment in update.segments()) == total
    assert {one.task.rank for one in found} == {3}


def test_events_have_the_words_of_the_prediction():
    tasks = [span.task for span in watched().timeline(0).spans]
    found = [(one.stream, one.kind, one.layer, one.name, one.seconds) for one in tasks]
    assert found == [
        ("compute", "around", "", "input", 0.5),
        ("compute", "around", "", "rest", 0.375),
        ("compute", "forward", "features.0", "conv", 1.0),
        ("compute", "around", "", "rest", 0.125),
        ("transfers", "transfer", "head", "head", 0.75),
        ("compute", "forward", "head", "fc", 2.0),
        ("compute", "around", "", "rest", 0.5),
        ("compute", "backward", "head", "fc", 3.0),
        ("compute", "copy", "head", "fc", 0.25),
        ("compute", "backward", "head", "fc", 0.125),
        ("transfers", "transfer", "head", "head", 0.5),
        ("compute", "backward", "features.0", "conv", 1.5),
        ("gradients", "gradient", "", "gradient", 1.0),
        ("compute", "update", "", "optimizer", 0.5),
        ("compute", "around", "", "rest", 0.25),
    ]


def test_on_one_device_nobody_is_waited_for_and_passes_are_whole():
    found = [span.task for span in watched(placed=False).timeline(0, alone=True).spans]
    assert {one.stream for one in found} == {"compute"}
    assert {one.kind for one in found} == {"around", "forward", "backward", "copy", "update"}
    assert sum(one.seconds for one in found if one.kind == "forward") == 3.125


def test_a_trace_of_them_has_no_gaps_and_no_overlaps():
    spans = [event for event in trace(measured=watched().timeline(0))["traceEvents"] if event["ph"] == "X"]
    for one, after in itertools.pairwise(spans):
        assert round(1e3 * (one["ts"] + one["dur"])) == round(1e3 * after["ts"])


@pytest.mark.parametrize(
    ("lengths", "number"),
    [([[3.0, 1.0, 2.0]], 2), ([[1.0, 2.0, 3.0], [1.0, 9.0, 3.0]], 2), ([[5.0]], 0), ([[2.0, 1.0], [2.0, 1.0]], 1)],
)
def test_the_typical_update_is_the_middle_one_of_the_slowest_rank(lengths, number):
    assert middle_update(lengths) == number
