"""A study of the batch on a made-up response: which trainings it asks for, what it finds, and its page."""

import json
import math
from pathlib import Path

import pytest

from bench.made_study import MACHINE
from convoy.bench.batch_page import write_batches
from convoy.bench.batches import (
    DIMINISHING,
    LEAST,
    NONE,
    PERFECT,
    BatchStudy,
    Search,
    agreement,
    is_broken,
    next_rates,
    regimes,
)
from convoy.bench.branch import mean_loss, over_the_lowest
from convoy.bench.jobs import Job, Outcome
from convoy.errors import ConvoyError
from convoy.recipe.recipe import load_recipe
from convoy.run.records import MetricsLine
from convoy.training.finite import ADVICE

BATCHES, NOISE = [32, 64, 128, 256, 512, 1024, 2048, 4096], 512


def fewest(batch: int) -> float:
    """McCandlish et al. (2018), equation 2.11."""
    return 100 * (1 + NOISE / batch)


def best_rate(batch: int) -> float:
    return 0.4 / (1 + NOISE / batch)


def train(job: Job) -> Outcome:
    """What a training gives: the best rate takes fewest updates, one of eight times that is too high."""
    recipe, octaves = job.recipe, math.log2((job.recipe.optimizer.lr or 0) / best_rate(job.recipe.batch))
    if octaves > 3:
        return Outcome({}, f"the loss became nan: {ADVICE}")
    every = recipe.evaluate_every.updates(1)
    needed = every * math.ceil(fewest(recipe.batch) * (1 + 0.5 * octaves**2) / every) + recipe.seed
    steps = min(needed, recipe.epochs.updates(4096 // recipe.batch))
    facts = {"reached": needed <= steps, "steps": steps, "train_s": 0.01 * steps, "noise_scale": 1.5 * NOISE}
    return Outcome(facts | {"best_top1": min(0.97, 0.9 * steps / needed)})


SETTINGS = ["model.name=lenet", "data.path=mnist-mini", "batch=64"]
RECIPES = {
    "sgd": load_recipe("default", SETTINGS),
    "lamb": load_recipe("default", [*SETTINGS, "optimizer.name=lamb", "optimizer.base_lr=0.02", "epochs=200"]),
}


def study(folder: Path, tune: bool = True, names: tuple[str, ...] = ("sgd", "lamb"), epochs: int = 20) -> BatchStudy:
    recipes = {name: {"optimizer": name, "epochs": epochs} for name in names}
    facts = {"model": "lenet", "recipes": recipes, "target": 0.97, "tune": tune, "num_train": 4096, "machine": "it"}
    new = BatchStudy.open(folder, facts=facts)
    new.machine, new.batches, new.seeds = MACHINE, BATCHES, 3
    return new


def run(study: BatchStudy, outcomes: dict[Path, Outcome]) -> list[str]:
    names = []
    while jobs := (search := Search(study, RECIPES, outcomes)).jobs:
        names.append(jobs[0].out.name)
        outcomes[jobs[0].out] = train(jobs[0])
    study.rows = search.rows
    return names


def test_the_best_rate_of_every_batch_is_found_and_the_study_goes_on(tmp_path: Path) -> None:
    new, outcomes = study(tmp_path), dict[Path, Outcome]()
    whole = run(new, outcomes)
    part = dict(list(outcomes.items())[:20])
    assert run(study(tmp_path), part) == whole[20:] and len(set(whole)) == len(whole)
    for name in RECIPES:
        rows = [row for row in new.rows if row.optimizer == name]
        assert [row.batch for row in rows] == BATCHES and new.reached(name) == rows
        for row in rows:
            assert abs(math.log2(row.lr / best_rate(row.batch))) < 0.5
            assert fewest(row.batch) <= row.updates <= 1.2 * fewest(row.batch) + 1
            assert row.ends[-1] - row.ends[0] == 2 and len(row.ends) == 3
            assert LEAST <= sum(run.startswith(f"{name}-{row.batch}-") for run in whole) - 2 <= 10
        names = [row.regime for row in rows]
        assert names[:2] == [PERFECT, PERFECT] and names[4:6] == [DIMINISHING] * 2 and names[-1] == NONE
        assert NOISE / 1.2 < (new.critical() or 0) < 1.2 * NOISE
    assert Search(new, {"lamb": RECIPES["lamb"]}, outcomes).rows == new.rows  # also without the other optimizer
    new.speedups = {batch: {4: 3.0} for batch in BATCHES}
    new.save()
    (tmp_path / "a-branches").mkdir()
    (tmp_path / "a-branches" / "branches.json").write_text(json.dumps({"useful": 512}))
    (tmp_path / "b-branches").mkdir()
    (tmp_path / "b-branches" / "branches.json").write_text("{}")
    written = write_batches(tmp_path)
    assert "b-branches/branches.json is damaged, and left out." in written.remarks
    assert any("The target is of the test split" in line for line in written.remarks)
    page = written.report.read_text()
    for words in ("perfect scaling", "4 devices, predicted", "batches.csv"):
        assert words in page
    assert len(written.tables["batches"].rows) == 2 * len(BATCHES)
    assert any(line.startswith("sgd: perfect scaling up to ") for line in written.remarks)
    (line,) = (line for line in written.remarks if "agree within a factor of two" in line)
    assert "512 by branches" in line and "768 by the gradient noise scale" in line


def test_a_failure_that_says_nothing_of_the_rate_is_no_score(tmp_path: Path) -> None:
    new, outcomes = study(tmp_path), dict[Path, Outcome]()
    broken = Search(new, RECIPES, {}).jobs[0].out
    (broken / "checkpoints").mkdir(parents=True)
    outcomes[broken] = Outcome({}, "no space left on device")
    run(new, outcomes)
    assert {row.optimizer for row in new.rows} == {"lamb"} and len(new.rows) == len(BATCHES)
    assert is_broken(outcomes[broken]) and (broken / "checkpoints").is_dir()


def test_a_loss_over_lines_weighs_updates() -> None:
    lines = [MetricsLine(split="train", step=n, epoch=n / 10, loss=loss) for n, loss in ((5, 9), (8, 1), (9, 3))]
    assert mean_loss(lines, 0.5) == 1.5
    assert over_the_lowest([-2.0, -1.0, None]) == [0, 0.5, None] and over_the_lowest([0.0, 2.0]) == [0, 1]


def test_a_batch_that_misses_the_target_is_said_to(tmp_path: Path) -> None:
    new, outcomes = study(tmp_path), dict[Path, Outcome]()
    run(new, outcomes)
    of_sgd = [row for row in new.rows if row.optimizer == "sgd"]
    of_sgd[-1].updates, of_sgd[-1].ends = math.inf, []
    new.save()
    written = write_batches(tmp_path)
    assert BatchStudy.read(tmp_path).rows == new.rows and len(written.tables["batches"].rows) == len(new.rows) - 1
    assert any("sgd did not reach the target at a batch of 4096" in line for line in written.remarks)


def test_measures_that_differ_are_said_to(tmp_path: Path) -> None:
    sentence = agreement({"the study": 512.0, "the gradient noise scale": 1600, "branches": None})
    assert sentence.endswith("about 1,600 by the gradient noise scale, 3.1 times apart: believe the study.")
    assert agreement({"the study": None, "branches": 3}) == ""


def test_no_regime_comes_back_once_it_is_left() -> None:
    assert regimes([1, 2, 4, 8, 16], [100, 52, 40, 20, 19]) == [PERFECT, PERFECT, DIMINISHING, DIMINISHING, NONE]


def test_a_search_ends_at_its_edge_and_prefers_lower_rates_where_all_fail() -> None:
    scores: dict[int, tuple[int, float]] = {}
    while places := next_rates(scores):
        scores |= {place: (0, -place) for place in places}  # the higher the better
    assert max(scores) == 14 and len(scores) <= 12
    assert -4 in next_rates({0: (2, 0), 2: (2, 2), -2: (2, -2)})


def test_another_study_is_refused(tmp_path: Path) -> None:
    study(tmp_path, tune=False).save()
    with pytest.raises(ConvoyError, match="is of a study with tune=False and not True"):
        study(tmp_path)
    study(tmp_path, tune=False, names=("lamb", "lars"))  # one is added
    with pytest.raises(ConvoyError, match=r"is of a study with recipes\.lars\.epochs=20 and not 30"):
        study(tmp_path, tune=False, names=("lars",), epochs=30)
    (tmp_path / "batches.json").write_text("{}")
    with pytest.raises(ConvoyError, match="is no study of convoy bench --batches"):
        BatchStudy.read(tmp_path)
