"""`--plan auto` in a run: what the planner says runs, after a race where that is close, and changes no number."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from convoy.comm.memory import NEEDS_LESS
from convoy.data import Batch
from convoy.errors import TooLargeError
from convoy.planner import Planned, make_plan
from convoy.planner.cost.costs import HostCost
from convoy.planner.measured import Measurements
from convoy.planner.planner import Race
from convoy.planner.planner import _raced as raced_by
from convoy.plans.plan import Plan
from convoy.training import Session, workloads
from convoy.training.step import TrainingStep
from ranks import run_ranks
from training.scenarios import session

FILTERS, HEIGHT, SAMPLES = map(Plan.parse, ("filter=2", "height=2", "sample=2"))


def planned(data: Path, cache: Path, *settings: str) -> Session:
    with patch.dict("os.environ", {"CONVOY_CACHE": str(cache)}):
        return session(data, "parallel.plan=auto", *settings)


def far(found: Session, data: Path, *settings: str) -> float:
    """How far the weights are after three updates from those under plain `sample`."""
    ends = []
    for each in (found, session(data, "parallel.plan=sample=2", *settings)):
        step = each.step()
        for update, batch in enumerate(each.batches(0, 3)):
            step(batch, update)
        ends.append({name: each.network.whole(name, x).clone() for name, x in each.model.state_dict().items()})
    return max(float((ends[0][n] - x).abs().max()) for n, x in ends[1].items() if x.is_floating_point())


def predicting(*plans: Plan) -> Callable[..., Planned]:
    """A planner that predicts the first of these plans to be fastest, then the next, and knows no others."""

    def planner(*args: Any, race: Race, **options: Any) -> Planned:
        planned = make_plan(*args, plans=plans, **options)
        by_plan = {scored.plan: scored for scored in planned.candidates}
        planned = replace(planned, candidates=tuple(by_plan[plan] for plan in plans))
        measurements = Measurements(args[0], args[2])
        return raced_by(planned, (), args[2], race, measurements, lambda what: None, lambda seconds: True)

    return planner


def raced(data: Path, cache: Path) -> tuple[str, list[str], float]:
    """The plan, the notes, and how far the weights are from those under `sample`, after a race that `height`
    leaves, as it runs out of memory on rank 1 in its second update."""
    step = TrainingStep.__call__

    def stepping(self: TrainingStep, batch: Batch, update: int) -> object:
        engine = self.network
        if engine.groups.rank == 1 and engine.plan == HEIGHT and update == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, batch, update)

    def seconds(racer: TrainingStep, *args: Any, **options: Any) -> float:
        return measure(racer, *args, **options) * (0.01 if racer.network.plan == FILTERS else 1.0)

    measure = workloads.update_seconds
    with (
        patch.object(workloads, "make_plan", predicting(HEIGHT, FILTERS, SAMPLES)),
        patch.object(workloads, "measure_input", lambda ready: None),
        patch.object(TrainingStep, "__call__", stepping),
        patch.object(workloads, "update_seconds", seconds),
    ):
        trained = planned(data, cache)
    return str(trained.plan), trained.notes, far(trained, data)


@pytest.mark.slow
def test_the_winner_of_the_race_runs_and_who_lacks_memory_on_one_rank_leaves_it(data: Path, tmp_path: Path) -> None:
    for plan, notes, distance in run_ranks(raced, 2, data, tmp_path):
        assert plan == "filter=2" and distance < 1e-5
        assert any("in a race over" in note for note in notes), notes
        assert f"height=2 left the race: rank 1 ran out of memory while racing height=2; {NEEDS_LESS}" in notes


def notes_of(data: Path, cache: Path, input_s: float | None, *settings: str) -> tuple[str, str, bool]:
    """The plan, what is said, and whether anything that was measured is kept."""
    cost = patch.object(workloads, "measure_input", lambda ready: HostCost(per_sample=input_s))
    try:
        with cost if input_s else nullcontext():
            found = planned(data, cache, *settings)
    except TooLargeError as error:
        return "", str(error), False
    returns = getattr(found.network, "returns_memory", False)
    notes = [*found.notes, *(["freed memory is given back"] if returns else [])]
    return str(found.plan), " ".join(notes), any(cache.rglob("*.json"))


def said(data: Path, cache: Path, cases: dict[str, tuple[str, ...]]) -> dict[str, str]:
    return {name: notes_of(data, cache, None, *settings)[1] for name, settings in cases.items()}


def test_all_ranks_agree_and_what_was_measured_is_kept(data: Path, tmp_path: Path) -> None:
    first, second = run_ranks(notes_of, 2, data, tmp_path / "once", 1.0)
    assert first[0] == second[0] and first[2]
    assert "plan auto: " in first[1] and "Input-bound" in first[1] and "of memory a device" in first[1]
    for plan, notes, kept in run_ranks(notes_of, 2, data, tmp_path / "bits", None, "reproducible=true"):
        assert plan == "sample=2" and "reproducible runs divide samples alone" in notes and not kept


@pytest.mark.slow
def test_plans_keep_to_the_memory_limit(data: Path, tmp_path: Path) -> None:
    cases = {
        "none": ("parallel.plan=auto", "parallel.memory_limit=10kB"),
        "auto": ("parallel.plan=auto", "parallel.memory_limit=90MB"),
        "stages": ("parallel.plan=stage=2", "parallel.memory_limit=90MB"),
        "small": ("parallel.plan=stage=2", "parallel.memory_limit=1kB"),
        "unseen": ("parallel.plan=sample=2", "parallel.memory_limit=90MB", "model.name=tiny:TinyUnseen"),
    }
    first, second = run_ranks(said, 2, data, tmp_path, cases)
    assert first == second
    assert re.match(r"no plan fits.*what the network itself computes takes most", first["none"])
    assert "within 90 MB of memory a device, as --memory-limit says" in first["auto"]
    assert first["stages"].endswith("freed memory is given back")
    assert "that cannot be captured" in first["unseen"]
    assert re.search(r"the plan stage=2 needs [\d.]+ kB on a device.*--memory-limit is 1kB", first["small"])
