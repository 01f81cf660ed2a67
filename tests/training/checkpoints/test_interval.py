"""Young's interval: the numbers, that it is the best one, and the sentence."""

import math

import pytest

from convoy.training.checkpoints.interval import Young
from convoy.training.config.timespan import TimeSpan, in_words

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
