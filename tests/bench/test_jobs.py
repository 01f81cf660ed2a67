"""Trainings side by side, on one device or several."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from convoy.bench.jobs import Job, Jobs
from whole_runs import recipe_of


@pytest.mark.slow
def test_two_at_a_time_one_on_both_one_fails_and_what_is_finished_stays(data: Path, tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")

    def job(name: str, **changes: str) -> Job:
        changes = {key.replace("__", "."): value for key, value in changes.items()}
        return Job(tmp_path / name, recipe_of(data, {"epochs": "2ba", "reproducible": "true"} | changes))

    a, two, bad = job("a"), job("two", parallel__devices="2"), job("bad", batch="1000")
    long, after = job("long", epochs="40000ba"), job("after", seed="1")
    said: list[tuple[str, str]] = []

    def run(*jobs: Job, stops: bool = False) -> dict[str, str | None]:
        def say(job: Job, text: str, done: int, total: int) -> None:
            said.append((job.out.name, text))
            if stops and "loss" in text:
                raise KeyboardInterrupt

        runner = Jobs.here("cpu")
        runner.say = say
        outcomes = runner.train(lambda done: [*jobs, *([after] if a.out in done else [])])
        return {out.name: outcome.failure for out, outcome in outcomes.items()}

    failures = run(a, two, bad)
    assert str(failures.pop("bad"))[:26] == "the batch of 1000 is large"
    assert failures == dict.fromkeys(["a", "two", "after"])
    weights = [(tmp_path / name / "weights.safetensors").read_bytes() for name in ("a", "two", "after")]
    assert weights[0] == weights[1] != weights[2]
    before, steps = (a.out / "summary.json").stat().st_mtime_ns, []
    for _ in range(2):  # it is stopped, goes on, and is stopped again
        with pytest.raises(KeyboardInterrupt):
            run(a, long, stops=True)
        summary: dict[str, Any] = json.loads((long.out / "summary.json").read_text())
        steps.append(summary["steps"])
        assert (summary["status"], summary["devices"]) == ("stopped", 1)
    assert 0 < steps[0] < steps[1] < 40_000
    assert (a.out / "summary.json").stat().st_mtime_ns == before
