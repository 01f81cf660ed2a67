"""The course of a study, whose ranks are made up."""

from pathlib import Path
from typing import Any

import pytest

from bench.made_study import MACHINE, RECIPE, ranks, study
from convoy.bench import command
from convoy.bench.command import MeasuringSchedule
from convoy.bench.configuration import configurations
from convoy.bench.processes import RankFailed, RankSlots
from convoy.bench.records import Forecast
from convoy.bench.store import Store
from convoy.errors import ConvoyError

WRONG = {"sample=2": ConvoyError("too few microbatches: give more"), "serial": RankFailed("rank 0 failed: full\nmore")}


def measure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, devices: list[int], plans: list[str], updates: int | None = None
) -> tuple[Store, list[str]]:
    """A study of rows of which those of `WRONG` do not run, and what it says; the planner chooses by filter."""
    rows = configurations(devices, plans, [])
    store, said = Store.open(folder, study(updates=updates), MACHINE), []
    store.begin("convoy bench lenet", "2026-11-22T09:00:00+00:00")

    def run_ranks(function: Any, slots: Any, task: Any, *_: Any, **__: Any) -> Any:
        if function is command.forecast:
            return [Forecast(auto=f"filter={len(slots)}")]
        plan = task.recipe.parallel.plan or f"sample={len(slots)}"
        if plan in WRONG:
            raise WRONG[plan]
        return ranks(0.1, len(slots))

    monkeypatch.setattr(command, "run_ranks", run_ranks)
    MeasuringSchedule(RECIPE, store.add(rows), store, RankSlots(1, []), predict=False, tell=said.append)()
    return store, said


def outcomes(store: Store) -> list[tuple[str, int, str | None]]:
    return [(row.key, len(row.visits), row.failed) for row in store.configurations]


@pytest.mark.parametrize("updates", [None, 7])
def test_the_first_rows_need_not_run(updates: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, said = measure(tmp_path, monkeypatch, [1, 2], ["sample", "filter"], updates)
    assert outcomes(store) == [
        ("serial on 1", 0, "rank 0 failed: full"),
        ("sample=2 on 2", 0, "too few microbatches: give more"),
        ("filter=2 on 2", 1, None),
    ]
    assert said == ["one device on 1 device: rank 0 failed: full", "sample=2 on 2 devices: " + str(WRONG["sample=2"])]
    assert store.study.updates == (updates or 20)


def test_the_planner_may_find_a_plan_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = measure(tmp_path, monkeypatch, [2], ["sample", "auto"])
    assert outcomes(store) == [
        ("sample=2 on 2", 0, "too few microbatches: give more"),
        ("auto on 2", 1, None),
    ]
    assert store.plan_of(configurations([2], ["auto"], [])[0]) == "filter=2"


def test_no_row_that_runs_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConvoyError, match="give more"):
        measure(tmp_path, monkeypatch, [2], ["sample"])
