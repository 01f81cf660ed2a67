"""When a checkpoint is due: the same updates on all ranks, whatever their clocks say; Young's interval."""

import math
import time
from pathlib import Path

import pytest

from convoy.comm.ranks import Ranks
from convoy.training.checkpoint_interval import FIRST_UPDATES, Automatic, Every, Pace, Young
from convoy.training.config import TimeSpan, in_words
from ranks import run_ranks


class Clock(Pace):
    """One that shows what it is told."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    @property
    def update_s(self) -> float:
        return self.seconds


def due(when: Automatic | Every, updates: range, clock: Clock, cost_s: float = 0.1) -> list[int]:
    """After which updates it was; every checkpoint is on disk at once."""
    found = []
    for done in updates:
        if when.due(done, clock):
            found.append(done)
            when.saved(done)
            when.measured(done, cost_s, 0.01, 0.5)
    return found


def test_a_wait_before_the_clock_runs_is_not_taken_from_it() -> None:
    pace = Pace()
    pace.waited(1000.0)
    pace.updated(1)
    time.sleep(0.01)
    pace.updated(2)
    assert pace.update_s >= 0.01


def test_every_so_many_updates() -> None:
    assert due(Every(4), range(1, 13), Clock(1.0)) == [4, 8, 12]


def automatic(multiple: int = 1) -> Automatic:
    return Automatic(Young(TimeSpan(320, "s"), multiple), Ranks.here())


@pytest.mark.parametrize(("update_s", "first"), [(0.001, FIRST_UPDATES), (1.0, 30), (100.0, 2)])
def test_the_first_is_soon_and_the_others_follow_from_its_cost(update_s: float, first: int) -> None:
    interval = 16  # sqrt(2 · 0.1 s · 320 s) = 8 s of 0.5 s each
    assert due(automatic(), range(1, 121), Clock(update_s)) == list(range(first, 121, interval))


def test_a_run_that_goes_on_counts_from_there() -> None:
    assert due(automatic(), range(1001, 1041), Clock(1.0)) == [1030]


def test_one_that_was_not_due_puts_the_next_off() -> None:
    when, clock = automatic(), Clock(1.0)
    assert due(when, range(1, 32), clock) == [30]
    when.saved(40)
    when.measured(40, 0.1, 0.01, 0.5)
    assert due(when, range(41, 60), clock) == [56]


def test_only_at_multiples_where_a_checkpoint_averages_the_weights() -> None:
    found = due(automatic(7), range(1, 200), Clock(0.3))
    assert len(found) > 5
    assert all(step % 7 == 0 for step in found)


def test_the_sentence_comes_once_and_again_when_it_is_half_or_double() -> None:
    when = automatic()
    said = [when.measured(step, cost, 0.0, 0.5) for step, cost in enumerate([0.1, 0.11, 0.12, 9.0, 9.0, 9.0, 9.0])]
    assert [sentence is not None for sentence in said] == [True, *[False] * 4, True, False]
    assert "checkpoint every 16 updates (8 s)" in str(said[0])


def _with_clocks_apart(folder: Path) -> list[int]:
    rank = Ranks.here().rank
    return due(automatic(), range(1, 100), Clock(1.0 if rank == 0 else 0.001 * rank))


def test_all_ranks_follow_one_clock(tmp_path: Path) -> None:
    first, *others = run_ranks(_with_clocks_apart, 3, tmp_path)
    assert first == [30, 46, 62, 78, 94]
    assert others == [first, first]


HOURS = TimeSpan(6, "h")


def test_the_sentence_has_formula_numbers_and_source() -> None:
    decided = Young(HOURS).decide(0.08, 0.5, 0.1427)
    assert decided.updates == round(math.sqrt(2 * 0.08 * 6 * 3600) / 0.1427) == 412
    assert decided.sentence == (
        "checkpoint every 412 updates (59 s): sqrt(2 · 0.08 s · 6 h), Young 1974; at most 59 s of work are lost"
    )


@pytest.mark.parametrize(("cost", "hours"), [(0.01, 0.1), (0.3, 6), (5, 24)])
def test_no_other_interval_loses_less(cost: float, hours: float) -> None:
    mtbf = hours * 3600

    def lost(interval: float) -> float:  # a share of all time: for checkpoints, and half an interval at every failure
        return cost / interval + interval / 2 / mtbf

    best = Young(TimeSpan(hours, "h")).decide(cost, 0.0, 0.001).seconds
    assert all(lost(best) <= lost(best * factor) for factor in (0.5, 0.9, 1.1, 2))


def test_it_is_never_shorter_than_writing_takes_and_says_so() -> None:
    decided = Young(TimeSpan(1, "min")).decide(0.01, 30.0, 0.5)
    assert (decided.updates, decided.seconds) == (60, 30.0)
    assert decided.sentence == (
        "checkpoint every 60 updates (30 s): as long as one takes to be written, more than sqrt(2 · 0.01 s · 60 s), "
        "Young 1974; at most 60 s of work are lost"
    )


def test_single_outliers_do_not_count() -> None:
    young = Young(HOURS)
    young.decide(9.0, 0.0, 0.1)
    for _ in range(4):
        decided = young.decide(0.08, 0.0, 0.1)
    assert decided.updates == Young(HOURS).decide(0.08, 0.0, 0.1).updates


def test_multiples_and_extremes() -> None:
    assert Young(HOURS, 7).decide(0.08, 0.0, 0.1427).updates == 413
    assert Young(TimeSpan(1, "s"), 7).decide(0.0, 0.0, 100.0).updates == 7
    one = Young(TimeSpan(1, "s")).decide(0.0, 0.0, 100.0)
    assert one.updates == 1
    assert one.sentence.startswith("checkpoint every 1 update (100 s)")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0312, "0.031 s"), (2.0, "2 s"), (31.4, "31 s"), (119, "119 s"), (300, "5 min"), (21600, "6 h"), (1e6, "278 h")],
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5 min", 90), ("6h", 21600), (" 2d ", 172800)])
def test_spans_are_read(text: str, seconds: float) -> None:
    span = TimeSpan.parse(text)
    assert span.seconds == seconds
    assert TimeSpan.parse(str(span)) == span


@pytest.mark.parametrize("text", ["6", 6, "h", "-1h", "0h", "1e3s", "6 hours", None, "9" * 50 + "s"])
def test_what_is_no_span_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"write (90s|more than 0)"):
        TimeSpan.parse(text)
