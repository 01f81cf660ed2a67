"""The course of a study's trainings, whose ranks are made up."""

from pathlib import Path
from typing import Any

import pytest

from bench.made_study import MACHINE, RECIPE, study
from convoy.bench import command
from convoy.bench.command import TrainingRuns
from convoy.bench.configuration import configurations
from convoy.bench.processes import RankFailed, RankSlots
from convoy.bench.results import Results
from convoy.bench.store import Store


@pytest.mark.slow
def test_a_training_that_a_signal_stopped_is_not_finished_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = configurations([1, 2], ["sample", "filter"], [])
    store = Store.open(tmp_path, study(), MACHINE)
    kept = store.add(rows)
    store.begin("convoy bench lenet", "2026-11-22T09:00:00+00:00")
    store.spent(100.0, 20.0)
    store.begin_training(1.0)
    ends: list[list[str | None] | RankFailed] = [
        [None], ["SIGTERM", "SIGTERM"], RankFailed("rank 1 failed: a fault\nTraceback"),
        [None, None], [None, None],
    ]  # fmt: skip
    trained: list[str] = []
    said: list[str] = []

    def run_ranks(function: Any, slots: Any, task: Any, *_: Any, **__: Any) -> list[str | None]:
        trained.append(str(task.recipe.parallel.plan))
        end = ends.pop(0)
        if isinstance(end, RankFailed):
            raise end
        return end

    def train() -> list[tuple[bool, str | None]]:
        runs = TrainingRuns(RECIPE, kept, store, RankSlots(1, []), tell=said.append)
        runs()
        return [(row.training.finished, row.training.failed) for row in kept if row.training is not None]

    monkeypatch.setattr(command, "run_ranks", run_ranks)
    assert train() == [(True, None), (False, None), (False, "rank 1 failed: a fault")]
    assert said == [
        "the training of sample=2 on 2 devices was stopped by SIGTERM; the same command goes on",
        "filter=2 on 2 devices was not trained: rank 1 failed: a fault",
    ]
    assert train() == [(True, None)] * 3
    assert trained == ["serial", "sample=2", "filter=2", "sample=2", "filter=2"]
    (session,) = store.sessions
    assert session.training_s > 0 and session.planning_s == 20.0
    assert session.wall_s == pytest.approx(100.0 + session.training_s, abs=2e-3)
    assert Results(store).wall == pytest.approx(100.0, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["", "emulated"])
def test_what_trainings_measure_is_kept_unless_the_devices_are_emulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str
) -> None:
    rows, made = configurations([2], ["sample"], []), study(cluster=cluster)
    store = Store.open(tmp_path, made, MACHINE)
    store.begin("convoy bench lenet", "2026-11-22T09:00:00+00:00")
    store.begin_training(1.0)
    keeps: list[bool] = []

    def run_ranks(function: Any, slots: Any, task: Any, out: Path, line: str, keep: bool, **_: Any) -> list[None]:
        keeps.append(keep)
        return [None, None]

    monkeypatch.setattr(command, "run_ranks", run_ranks)
    TrainingRuns(RECIPE, store.add(rows), store, RankSlots(1, []))()
    assert keeps == [not cluster]
