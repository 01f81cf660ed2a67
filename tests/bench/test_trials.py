"""Studies of trials and folds: which trials come, what they give over stops, more of them and other hosts."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from convoy.bench.jobs import Outcome
from convoy.bench.trials import TrialStudy, space_of, train_trials
from convoy.bench.trials_page import write_trials
from convoy.cli import main
from convoy.errors import ConvoyError
from convoy.recipe.recipe import Recipe, load_recipe
from convoy.training.finite import ADVICE
from whole_runs import recipe_of

OVERS = ["data.mix.mixup=0,0.2", "optimizer.lr=0.001..1:log", "schedule.warmup=1ba,9ba"]


def load(values: Mapping[str, Any]) -> Recipe:
    settings = {"model.name": "lenet", "data.path": "mnist-mini", "epochs": "5ba", **values}
    return load_recipe("default", [f"{key}={value}" for key, value in settings.items()])


def made_up(folder: Path, number: int, outcomes: dict[Path, Outcome], seed: int = 0) -> TrialStudy:
    """A study whose trainings are best at a rate of 0.1 with mixup, and fail from 0.5 on."""
    folder.mkdir(exist_ok=True)
    facts = {"folds": 0, "metric": "top1", "is_lower": False, "over": OVERS, "recipe": load({}).model_dump(mode="json")}
    facts["recipe"]["seed"] = seed
    study = TrialStudy(folder=folder, facts=facts, number=number)
    study.begin({"machine": "it"}, "convoy trials lenet --json")
    while jobs := study.jobs(load, "here", 1, outcomes):
        (job,), rate, mixup = jobs, jobs[0].recipe.optimizer.lr or 0, jobs[0].recipe.data.mix.mixup
        summary = {"best": 0.9 - 0.1 * abs(math.log10(rate) + 1) + mixup / 10, "epochs": 1.0, "train_s": 2.0}
        outcomes[job.out] = Outcome(summary, None if rate < 0.5 else f"the loss became nan: {ADVICE}")
    study.save()
    return study


def test_a_search_goes_on_as_if_it_had_run_through_and_says_what_is_best(tmp_path: Path) -> None:
    outcomes = dict[Path, Outcome]()
    whole = made_up(tmp_path / "whole", 24, {})
    made_up(tmp_path / "part", 13, outcomes)
    assert made_up(tmp_path / "part", 24, outcomes).trials == whole.trials
    assert made_up(tmp_path / "other", 24, {}, seed=1).trials != whole.trials
    best, *_ = ranked = whole.ranked()
    assert 0.03 < best.values["optimizer.lr"] < 0.3 and best.values["data.mix.mixup"] == "0.2"
    failures = [one.failure for one in whole.trials if one not in ranked]
    assert any(ADVICE in str(failure) for failure in failures)
    assert any("schedule.warmup=9ba is longer" in str(failure) for failure in failures)
    rates = [one.values["optimizer.lr"] for one in whole.trials]
    near = [0.01 < rate < 0.5 for rate in rates]  # the first ten are random
    assert sum(near[10:]) / 14 > sum(near[:10]) / 10
    assert all(rate == float(f"{rate:.4g}") for rate in rates)
    written = write_trials(tmp_path / "whole")
    assert written.tables["trials"].rows[0]["trained"] == best.name
    values = " ".join(f"--set {key}={value}" for key, value in best.values.items())
    assert written.remarks[-1].endswith(f": convoy train lenet {values}")
    assert str(rates[-1]) in (text := written.report.read_text())
    written.report.unlink()
    assert main(["report", str(tmp_path / "whole")]) == 0 and written.report.read_text() == text


def test_what_a_range_is_of(tmp_path: Path) -> None:
    overs = ["batch=8.0..64", "optimizer.lr=.1..2E0", "model.options.width=2..4:log", "data.mean=[0.1],[0.2]"]
    kinds = {key: type(values).__name__ for key, values in space_of(overs).items()}
    assert [*kinds.values()] == [f"{kind}Distribution" for kind in ("Int", "Float", "Int", "Categorical")]
    assert space_of(overs)["optimizer.lr"].low == 0.1
    assert space_of(overs)["data.mean"].choices == ("[0.1]", "[0.2]")


def study_of(data: Path, folder: Path, number: int, stops: str = "none") -> list[tuple[dict[str, Any], float | None]]:
    """Values and scores of a study on one device, which is interrupted when a training begins."""

    def say(text: str, done: int, total: int) -> None:
        if text.startswith(stops):
            raise KeyboardInterrupt

    def loaded(values: Mapping[str, Any]) -> Recipe:
        return recipe_of(data, {"epochs": "12ba", **{key: str(value) for key, value in values.items()}})

    settings = ["data.augment.random_erasing=0..0.5", "optimizer.momentum=0.5,0.9"]
    train_trials(folder, settings, number, loaded, "convoy trials", (1, "cpu"), say, print)
    return [(one.values, one.score) for one in TrialStudy.read(folder).trials]


@pytest.mark.slow
def test_a_study_that_goes_on_is_that_which_ran_through(data: Path, tmp_path: Path) -> None:
    whole = study_of(data, tmp_path / "whole", 4)
    with pytest.raises(KeyboardInterrupt):
        study_of(data, tmp_path / "part", 3, stops="trial-002: training")
    assert study_of(data, tmp_path / "part", 3) == whole[:3]
    assert study_of(data, tmp_path / "part", 4) == whole and len({str(values) for values, _ in whole}) == 4
    run = json.loads((tmp_path / "part" / "trial-001" / "summary.json").read_text())
    assert run["best"] == whole[0][1] and run["num_test"] > 0
    assert "held out for validation" in str(run["notes"])
    with pytest.raises(ConvoyError, match="is of a study with over="):
        train_trials(tmp_path / "part", ["batch=8,9"], 4, load, "", (1, "cpu"), lambda *_: None, print)


@pytest.mark.slow
def test_hosts_take_different_trials(data: Path, tmp_path: Path) -> None:
    code = "import socket, sys; socket.gethostname = lambda: sys.argv[1]; from convoy.cli import main; "
    line = f"trials lenet --data {data} --batch 24 --over optimizer.lr=0.01..0.1 --budget 5x8ba --devices 1"
    words = [*line.split(), "--set", "threads=1", "--out", str(tmp_path / "out")]
    hosts = [subprocess.Popen([sys.executable, "-c", f"{code}sys.exit(main({words}))", name]) for name in "ab"]
    assert [host.wait(120) for host in hosts] == [0, 0]
    claims = {path.stem: json.loads(path.read_text())["host"] for path in (tmp_path / "out").glob("trial-*.json")}
    assert len(claims) == 5 and {*claims.values()} == {"a", "b"}
    for name in claims:
        begun = json.loads((tmp_path / "out" / name / "environment.json").read_text())
        assert "restarts" not in begun
    trials = TrialStudy.read(tmp_path / "out").trials
    assert [one.name for one in trials] == sorted(claims) and any(one.score is not None for one in trials)


@pytest.mark.slow
def test_folds_on_two_devices_are_those_on_one(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    line = f"folds 2 tiny:TinyNet --data {data} --batch 24 --epochs 4ba --reproducible --set microbatch=12 --json"
    assert main([*line.split(), "--out", str(tmp_path / "one"), "--devices", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert main([*line.split(), "--out", str(tmp_path / "two"), "--set", "parallel.devices=2"]) == 0
    weights = {
        out: [(tmp_path / out / name / "weights.safetensors").read_bytes() for name in ("fold-001", "fold-002")]
        for out in ("one", "two")
    }
    assert weights["one"] == weights["two"] and weights["one"][0] != weights["one"][1]
    for row in document["trials"]:
        summary = json.loads((tmp_path / "one" / row["name"] / "summary.json").read_text())
        assert row["score"] == summary["top1"] and summary["split"] == "validation"
        lines = (tmp_path / "one" / row["name"] / "metrics.jsonl").read_text()
        assert '"test"' not in lines
    before = (tmp_path / "one" / "fold-001" / "summary.json").stat().st_mtime_ns
    assert main([*line.split(), "--out", str(tmp_path / "one")]) == 0
    assert (tmp_path / "one" / "fold-001" / "summary.json").stat().st_mtime_ns == before
