"""When a checkpoint is due: the same updates on all ranks, whatever their clocks say."""

import time
from pathlib import Path

import pytest

from convoy.planning import Ranks
from convoy.training.checkpoints.interval import Young
from convoy.training.checkpoints.when import FIRST_UPDATES, Automatic, Every, Pace
from convoy.training.config.timespan import TimeSpan
from convoy.training.ranks.devices import Devices
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
    return Automatic(Young(TimeSpan(320, "s"), multiple), Devices(Ranks.here()))


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
