"""Timelines against what they come to by hand."""

import pytest

from convoy.planner.cost.simulation import simulate
from convoy.plans.timeline import Task


def compute(seconds, *after, rank=0, kind="forward", layer="a"):
    return Task(rank, "compute", kind, layer, layer, seconds, after)


def message(seconds, *after, rank=0, meeting=-1, share=0.0, stream="gradients", layer="g"):
    return Task(rank, stream, "gradient", layer, layer, seconds, after, meeting, share)


def ends(tasks):
    return [pytest.approx(span.end) for span in simulate(tasks).spans]


def test_a_stream_runs_its_tasks_one_after_the_other():
    assert ends([compute(2), compute(3), compute(1)]) == [2, 5, 6]


def test_a_task_waits_for_what_it_needs():
    assert ends([compute(2), message(5, 0), compute(1, 0), compute(1, 1)]) == [2, 7, 3, 8]


def test_messages_hide_behind_what_computes():
    timeline = simulate([compute(2), message(3, 0), compute(4, 0), compute(1, 1, kind="update")])
    assert timeline.total == pytest.approx(7)
    assert timeline.exposed() == {}
    longer = simulate([compute(2), message(5, 0), compute(4, 0), compute(1, 1, kind="update")])
    assert longer.total == pytest.approx(8)
    assert longer.exposed() == {"g": pytest.approx(1)}


def test_messages_of_one_stream_queue():
    tasks = [compute(1), message(3, 0), compute(1, 0), message(2, 2), compute(1, 1, 3)]
    assert ends(tasks) == [1, 4, 2, 6, 7]


def test_a_message_takes_cycles_from_what_computes():
    """A quarter for 4 s: 3 of 5 s are done at 4, the rest takes 2."""
    timeline = simulate([message(4, share=0.25), compute(5)])
    assert [span.end for span in timeline.spans] == [pytest.approx(4), pytest.approx(6)]
    assert timeline.contention() == pytest.approx(1)
    assert simulate([message(4, share=0.0), compute(5)]).total == pytest.approx(5)


def test_a_message_that_takes_the_whole_core_hides_nothing():
    assert simulate([message(4, share=1.0), compute(5)]).total == pytest.approx(9)
    assert ends([compute(2), message(4, 0, share=1.0), compute(5, 0)]) == [2, 6, 11]


def test_two_messages_at_once_share_the_way():
    """Half each: the short one is done at 4, and what is left of the long one at 5."""
    assert ends([message(2, stream="transfers"), message(3)]) == [4, 5]


def test_two_messages_at_once_take_no_more_cycles_than_one_after_the_other():
    together = simulate([message(2, stream="transfers", share=0.5), message(2, share=0.5), compute(10)])
    assert [span.end for span in together.spans] == [pytest.approx(4), pytest.approx(4), pytest.approx(12)]


def test_a_collective_begins_when_the_last_rank_is_there_and_ends_for_all():
    tasks = [
        compute(1),
        compute(3, rank=1),
        message(2, 0, meeting=7),
        message(2, 1, rank=1, meeting=7),
        compute(1, 2),
        compute(1, 3, rank=1),
    ]
    timeline = simulate(tasks)
    assert [(span.ready, span.start, span.end) for span in timeline.spans[2:4]] == [(1, 3, 5), (3, 3, 5)]
    assert timeline.total == 6
    assert timeline.exposed(0) == {"g": pytest.approx(4)}
    assert timeline.exposed(1) == {"g": pytest.approx(2)}
    assert timeline.busiest == 1
    apart = [task if task.meeting < 0 else message(2, *task.after, rank=task.rank) for task in tasks]
    assert simulate(apart).spans[2].end == 3


def test_a_collective_is_as_slow_as_its_slowest_rank():
    """Rank 1 has two messages at once for the first 2 s of the collective, so that both go at half speed."""
    tasks = [message(4, meeting=0), message(4, rank=1, meeting=0), message(1, rank=1, stream="transfers")]
    assert ends(tasks) == [5, 5, 2]


def test_where_the_time_goes_adds_up_to_the_total():
    tasks = [compute(2), message(5, 0, share=0.5), compute(1, 0, kind="backward"), compute(1, 1, kind="update")]
    timeline = simulate(tasks)
    found = timeline.by_kind()
    assert found == {
        "forward": pytest.approx(2),
        "backward": pytest.approx(2),
        "update": pytest.approx(1),
        "exposed": pytest.approx(3),
        "idle": pytest.approx(0),
    }
    assert sum(found.values()) == pytest.approx(timeline.total) == 8


def test_a_rank_that_is_done_early_is_idle():
    timeline = simulate([compute(1), compute(4, rank=1)])
    assert timeline.by_kind(0)["idle"] == pytest.approx(3)
    assert timeline.by_kind(1)["idle"] == 0


def test_tasks_that_take_no_time_end_when_they_begin():
    assert ends([compute(0), message(0, 0), compute(1, 1), compute(0)]) == [0, 0, 1, 1]
    assert simulate([]).total == 0


def test_tasks_that_wait_for_each_other_are_refused():
    with pytest.raises(ValueError, match="wait for each other"):
        simulate([compute(1, 1), message(1, 0)])
    with pytest.raises(ValueError, match="wait for each other"):  # in opposite orders on two ranks
        simulate(
            [
                message(1, meeting=0),
                message(1, meeting=1),
                message(1, rank=1, meeting=1),
                message(1, rank=1, meeting=0),
            ]
        )
