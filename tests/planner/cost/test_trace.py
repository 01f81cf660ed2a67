"""Traces that viewers open."""

import json

from convoy.planner.cost.simulation import simulate
from convoy.planner.cost.trace import trace
from convoy.plans.timeline import Span, Task, Timeline

TASKS = [
    Task(0, "compute", "forward", "conv1", "conv1", 0.002),
    Task(0, "gradients", "gradient", "conv1", "conv1.weight", 0.001, (0,), 0, num_bytes=400),
    Task(1, "compute", "forward", "conv1", "conv1", 0.001),
    Task(1, "gradients", "gradient", "conv1", "conv1.weight", 0.001, (2,), 0, num_bytes=400),
]
MEASURED = Timeline(
    (
        Span(Task(0, "compute", "forward", "conv1", "conv1", 0.0025), 0.0, 0.0, 0.0025),
        Span(Task(0, "transfers", "transfer", "", "", 0.0), 0.0025, 0.0025, 0.0025),
    )
)


def made():
    return trace(predicted=simulate(TASKS), measured=MEASURED)


def test_every_event_has_what_the_format_asks_for():
    found = json.loads(json.dumps(made(), allow_nan=False))
    assert set(found) == {"traceEvents", "displayTimeUnit"}
    for event in found["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert event["name"]
        assert all(type(event[name]) is int for name in ("pid", "tid"))
        assert event["pid"] > 0  # 0 is the kernel's
        assert isinstance(event["ts"], int | float)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert isinstance(event["cat"], str)
        else:
            assert event["args"]


def test_a_process_for_each_rank_and_a_thread_for_each_stream():
    found = made()["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert sorted(named.values()) == ["measured rank 0", "predicted rank 0", "predicted rank 1"]
    order = sorted(named, key=lambda pid: pid)
    assert [named[pid] for pid in order] == ["predicted rank 0", "measured rank 0", "predicted rank 1"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    for event in found:
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in threads
    message = next(event for event in found if event["name"] == "conv1.weight")
    assert threads[message["pid"], message["tid"]] == "gradients"


def test_times_are_microseconds():
    message = next(event for event in made()["traceEvents"] if event["name"] == "conv1.weight" and event["pid"] == 1)
    assert (message["ts"], message["dur"]) == (2000.0, 1000.0)
    assert message["args"] == {"layer": "conv1", "kind": "gradient", "bytes": 400}


def test_events_of_a_thread_do_not_overlap():
    found = [event for event in made()["traceEvents"] if event["ph"] == "X"]
    for one in found:
        for other in found:
            if one is not other and (one["pid"], one["tid"]) == (other["pid"], other["tid"]):
                assert one["ts"] + one["dur"] <= other["ts"] or other["ts"] + other["dur"] <= one["ts"]
