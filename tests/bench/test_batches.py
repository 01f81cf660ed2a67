"""A study of the batch on a made-up response: which trainings it asks for, what it finds, and its page."""

import json
import math
from pathlib import Path

import pytest

from bench.made_study import MACHINE, RECIPE
from convoy.bench.batch_page import write_batches
from convoy.bench.batches import BatchCourse, BatchFacts, BatchStudy, StepTime
from convoy.bench.jobs import Job
from convoy.bench.search import DIMINISHING, LEAST, NONE, PERFECT, next_rates, regimes
from convoy.errors import ConvoyError
from convoy.training import Recipe, load_recipe
from convoy.training.gradients import ADVICE

BATCHES, NOISE = [32, 64, 128, 256, 512, 1024, 2048, 4096], 512


def fewest(batch: int) -> float:
    """McCandlish et al. (2018), equation 2.11."""
    return 100 * (1 + NOISE / batch)


def best_rate(batch: int) -> float:
    return 0.4 / (1 + NOISE / batch)


def train(folder: Path, job: Job) -> str | None:
    """What a training leaves: the best rate takes fewest updates, one of eight times that is too high."""
    recipe, octaves = job.recipe, math.log2((job.recipe.optimizer.lr or 0) / best_rate(job.recipe.batch))
    if octaves > 3:
        return f"the loss became nan: {ADVICE}"
    every = recipe.evaluate_every.updates(1)
    needed = every * math.ceil(fewest(recipe.batch) * (1 + 0.5 * octaves**2) / every) + recipe.seed
    steps = min(needed, recipe.epochs.updates(4096 // recipe.batch))
    facts = {"status": "finished", "reached": needed <= steps, "steps": steps, "train_s": 0.01 * steps}
    (folder / job.name).mkdir(parents=True, exist_ok=True)
    facts |= {"best_top1": min(0.97, 0.9 * steps / needed)}
    (folder / job.name / "summary.json").write_text(json.dumps(facts))
    return None


def course(folder: Path, recipe: Recipe = RECIPE, tune: bool = True) -> BatchCourse:
    recipes = {"sgd": recipe, "lamb": load_recipe("default", ["model.name=lenet", *_LAMB])}
    plain = {name: {"optimizer": name} for name in recipes}
    facts = BatchFacts(
        model="lenet", recipes=plain, target=0.97, tune=tune, device_type="cpu", cores_per_device=1, num_train=4096
    )
    study = BatchStudy.open(folder, facts)
    study.machine, study.batches, study.seeds = MACHINE, BATCHES, 3
    return BatchCourse(study, recipes, folder)


_LAMB = ["data.path=mnist-mini", "optimizer.name=lamb", "optimizer.base_lr=0.02", "epochs=200"]


def run(course: BatchCourse, most: int = 10_000) -> list[str]:
    names = []
    while (jobs := course.wanted()) and len(names) < most:
        names.append(jobs[0].name)
        course.ended(jobs[0], train(course.folder, jobs[0]))
    return names


def test_the_best_rate_of_every_batch_is_found_and_the_study_goes_on(tmp_path: Path) -> None:
    whole = run(course(tmp_path / "whole"))
    first = run(course(tmp_path / "parts"), most=20)
    rest = course(tmp_path / "parts")
    assert first + run(rest) == whole and len(set(whole)) == len(whole)
    for name in ("sgd", "lamb"):
        rows = rest.study.rows(name)
        assert [row.best.batch for row in rows] == BATCHES and all(row.reached for row in rows)
        for row in rows:
            assert abs(math.log2(row.best.lr / best_rate(row.best.batch))) < 0.5
            assert fewest(row.best.batch) <= row.updates <= 1.15 * fewest(row.best.batch) + row.best.every
            assert row.band == (row.best.updates, row.best.updates + 2) and len(row.trials) == 3
            rates = [t for t in rest.study.of(name, row.best.batch) if t.seed == 0]
            assert LEAST <= len(rates) <= 10
    found = regimes(BATCHES, [row.updates for row in rest.study.rows("sgd")])
    assert found[:2] == [PERFECT, PERFECT] and found[4:6] == [DIMINISHING] * 2 and found[-1] == NONE
    rest.study.step_times = [
        StepTime(batch=b, devices=n, seconds=b / n / 1e4, measured=n < 4) for b in BATCHES for n in (1, 4)
    ]
    rest.study.save(tmp_path / "parts")
    written = write_batches(tmp_path / "parts")
    page = written.report.read_text()
    assert all(
        words in page for words in ("perfect scaling", "4 devices, predicted", "square-root rule", "batches.csv")
    )
    assert len(written.tables["batches"].rows) == 2 * len(BATCHES)
    assert any(line.startswith("sgd: perfect scaling up to ") for line in written.remarks)


def test_no_regime_comes_back_once_it_is_left() -> None:
    assert regimes([1, 2, 4, 8, 16], [100, 52, 40, 20, 19]) == [PERFECT, PERFECT, DIMINISHING, DIMINISHING, NONE]


def test_a_search_ends_at_its_edge_and_prefers_lower_rates_where_all_fail() -> None:
    scores: dict[int, tuple[int, float]] = {}
    while places := next_rates(scores):
        scores |= {place: (0, -place) for place in places}  # the higher the better
    assert max(scores) == 14 and len(scores) <= 12
    assert -4 in next_rates({0: (2, 1.0), 2: (2, 2.0), -2: (2, 0.5)})


def test_a_study_without_the_target_and_another_one_are_refused(tmp_path: Path) -> None:
    short = course(
        tmp_path,
        RECIPE.model_copy(
            update={"epochs": load_recipe("default", ["model.name=lenet", "data.path=x", "epochs=3ba"]).epochs}
        ),
        tune=False,
    )
    short.recipes.pop("lamb")
    run(short)
    with pytest.raises(ConvoyError, match=r"no training reached --target 0\.97: the best was"):
        short.check_reached()
    with pytest.raises(ConvoyError, match="is of a study with tune=False and not True"):
        course(tmp_path)
    (tmp_path / "batches.json").write_text("{}")
    with pytest.raises(ConvoyError, match="is no study of convoy bench --batches"):
        BatchStudy.read(tmp_path)
