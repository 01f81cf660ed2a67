"""What the planner chooses for a row, and that the row runs it: on devices of which the second seems slower."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from bench.made_study import study
from convoy.bench.configuration import configurations
from convoy.bench.forecast import forecast
from convoy.bench.measure import measure_rank
from convoy.bench.measurement import MeasurementTask
from convoy.bench.records import Forecast, StudyFacts
from convoy.bench.store import Store
from convoy.bench.study import recipe_for
from convoy.engine.profiling import CallTimes, Profile, Profiler
from convoy.planner import make_plan
from convoy.planner.cost.link import Links, Rate
from convoy.plans.plan import Plan
from convoy.training import auto_plan, load_recipe
from ranks import run_ranks

TINY = load_recipe("default", ["model.name=tiny:TinyNet", "data.path=mnist-mini", "batch=16", "microbatch=2"])


def of_tiny() -> StudyFacts:
    return study(TINY)


def task(**changes: object) -> MeasurementTask:
    plain = of_tiny()
    (row,) = configurations([2], ["auto"], [])
    return replace(
        MeasurementTask("convoy", recipe_for(TINY, plain, row, None), plain.images, "cpu", updates=1, warm_up=0),
        **changes,  # type: ignore[arg-type]
    )


def nothing(what: str, done: int, total: int) -> None:
    """No progress."""


def planned(folder: str, slower: float, bound: tuple[str, ...]) -> Forecast:
    run = Profiler.run

    def taking(profiler: Profiler, *args: object) -> Profile:
        found = run(profiler, *args)  # type: ignore[arg-type]
        seconds = 1e-3 * (slower if dist.get_rank() else 1.0)
        calls = {name: CallTimes(seconds, seconds) for name in found.calls}
        return replace(found, calls=calls, seconds=seconds, slowest=seconds)

    links = Links(otherwise=lambda group: Rate(2e-5, 5e9).link(len(group), overlap=False, cpu_share=1.0))
    with_links = partial(make_plan, link=links)
    only = partial(with_links, plans=[Plan.parse("sample=2")])
    with (
        pytest.MonkeyPatch.context() as patched,
        patch.object(Profiler, "run", taking),
        patch.object(auto_plan, "make_plan", only),
        patch.object(sys.modules[forecast.__module__], "make_plan", with_links),
    ):
        patched.setenv("CONVOY_CACHE", folder)
        return forecast(task(), ["auto", "sample=2"], bound, True, False, nothing)


def microbatches(recipe: object) -> int:
    return measure_rank(task(recipe=recipe), nothing).microbatches


@pytest.mark.matrix
def test_the_planners_row_has_the_planners_shares(tmp_path: Path) -> None:
    found, again = run_ranks(planned, 2, str(tmp_path), 3.0, ("1,1",), timeout=240)
    assert (found.auto, found.auto_shares, found.bound) == ("sample=2", [6, 2], {"1,1": "sample=2"})
    assert (again.auto, again.auto_shares) == (found.auto, found.auto_shares)
    assert "plan auto divides the batch by speed: 6,2 microbatches" in found.notes
    assert found.predictions["auto"].seconds < found.predictions["sample=2"].seconds
    store = Store.open(tmp_path, of_tiny(), {})
    rows = store.add(configurations([2], ["sample", "auto"], [], ["", "1,1"]))
    store.put_forecast(2, found)
    recipes = [recipe_for(TINY, store.study, row, store.plan_of(row), store.shares_of(row)) for row in rows]
    had = [run_ranks(microbatches, 2, recipe) for recipe in recipes]
    assert had == [[4, 4], [4, 4], [6, 2], [4, 4]]


@pytest.mark.matrix
def test_equal_devices_have_even_parts(tmp_path: Path) -> None:
    for found in run_ranks(planned, 2, str(tmp_path), 1.0, (), timeout=240):
        assert (found.auto, found.auto_shares, found.bound) == ("sample=2", None, {})
        assert set(found.predictions) == {"sample=2"}
