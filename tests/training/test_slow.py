"""Which rank is called slow, and when."""

import time
from pathlib import Path

import pytest

from convoy.comm.ranks import Ranks
from convoy.training import division as slow
from convoy.training.division import Division, SlowRanks, divide
from convoy.training.environment import join_ranks
from convoy.training.input import InputPipeline
from ranks import run_ranks
from tiny import write_mnist
from whole_runs import Ended, as_before, train_here


def looks(monkeypatch: pytest.MonkeyPatch, division: Division, stretches: list[list[float]]) -> list[str | None]:
    named = [(rank, "abc"[rank]) for rank in range(len(division.counts))]
    ranks = Ranks()
    monkeypatch.setattr(ranks, "gather", lambda value: named)
    judge = SlowRanks(ranks)
    return [judge.look(seconds, 20, 2.5 * max(seconds), division) for seconds in stretches]


EVEN = divide((1,) * 6, 3)
SLOW = [1.0, 2.0, 1.0]


def test_a_rank_that_stays_slow_is_named_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    said = looks(monkeypatch, EVEN, [SLOW] * 13)
    assert [i for i, sentence in enumerate(said, 1) if sentence] == [3, 6, 12]
    assert said[2] is not None and said[2].startswith(
        "rank 1 on host b is slow: its part of an update takes it 100 ms, 2 "
    )


@pytest.mark.parametrize(
    "stretches",
    [
        [[1.0, 1.2, 1.0]] * 9,
        [SLOW, SLOW, [1.0, 1.0, 1.0]] * 4,
        [SLOW, [2.0, 1.0, 1.0]] * 4,
        [[0.001, 0.003, 0.001]] * 9,
    ],
)
def test_nobody_cries_wolf(monkeypatch: pytest.MonkeyPatch, stretches: list[list[float]]) -> None:
    assert set(looks(monkeypatch, EVEN, stretches)) == {None}


def test_a_rank_that_was_given_more_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    division = divide((1,) * 6, 3, (1, 4, 1))
    assert set(looks(monkeypatch, division, [[1.0, 4.0, 1.0]] * 9)) == {None}
    assert any(looks(monkeypatch, division, [[2.0, 4.0, 1.0]] * 9))


def groups(monkeypatch: pytest.MonkeyPatch, parts: list[int], division: Division, seconds: list[float]) -> list[int]:
    """The stretches in which somebody is named, where ranks have these parts of the batch."""
    ranks = Ranks()
    monkeypatch.setattr(ranks, "gather", lambda value: [(part, "host") for part in parts])
    judge = SlowRanks(ranks)
    return [i for i in range(1, 7) if judge.look(seconds, 20, 2.5 * max(seconds), division)]


def test_ranks_without_samples_are_not_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    division = Division((1,) * 6, (2, 2, 2, 0, 0, 0, 0))
    assert groups(monkeypatch, list(range(7)), division, [1.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0]) == [3, 6]


def test_only_ranks_in_the_same_place_of_their_groups_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    division = divide((1,) * 6, 3)
    parts = [0, 0, 1, 1, 2, 2]
    assert groups(monkeypatch, parts, division, [1.0, 3.0, 1.0, 3.0, 1.0, 3.0]) == []
    assert groups(monkeypatch, parts, division, [1.0, 3.0, 2.0, 3.0, 1.0, 3.0]) == [3, 6]
    stages_first = [0, 1, 2, 0, 1, 2]  # stage=2,sample=3: the second stage has less to do
    assert groups(monkeypatch, stages_first, division, [3.0, 3.0, 3.0, 1.0, 1.0, 1.0]) == []
    assert groups(monkeypatch, stages_first, division, [3.0, 3.0, 3.0, 1.0, 2.0, 1.0]) == [3, 6]
    assert groups(monkeypatch, [0, 0, 0], divide((1,) * 6, 1), [1.0, 3.0, 1.0]) == []


def _one_sleeps(data: Path, out: Path) -> Ended:
    """Rank 1 has a slow way to its pictures."""
    rank = join_ranks()[0].rank
    with as_before() as patch:
        patch.setattr(slow, "STRETCH_S", 0.0)
        if rank == 1:
            call = InputPipeline.__call__

            def late(self: InputPipeline, *args: object) -> object:
                time.sleep(0.02)
                return call(self, *args)  # type: ignore[arg-type]

            patch.setattr(InputPipeline, "__call__", late)
        return train_here(data, out, {"epochs": "50ba", "log_every": "10ba"})


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_in_the_log(tmp_path: Path) -> None:
    data = write_mnist(tmp_path / "data")
    first, *_ = run_ranks(_one_sleeps, 2, data, tmp_path / "run")
    assert any(sentence.startswith("rank 1 on host ") and " is slow: " in sentence for sentence in first.said)
