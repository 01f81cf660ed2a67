"""Many trainings, one a device at a time."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from convoy.bench.jobs import Job, Jobs
from whole_runs import recipe_of


def jobs_of(data: Path, **settings: dict[str, str]) -> list[Job]:
    return [Job(name, recipe_of(data, {"epochs": "2ba"} | changes)) for name, changes in settings.items()]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_at_a_time_one_fails_and_what_is_finished_stays(data: Path, tmp_path: Path) -> None:
    jobs = jobs_of(data, a={}, bad={"batch": "1000"}, long={"epochs": "40000ba"}, b={"seed": "1"})
    ended: dict[str, str | None] = {}

    def run(names: str, stops: bool = False) -> None:
        chosen = [job for job in jobs if job.name in names.split()]
        runner = Jobs(tmp_path, "cpu", progress=interrupt if stops else lambda text: None)
        runner.run(lambda: [job for job in chosen if job.name not in ended], lambda j, f: ended.update({j.name: f}))

    def interrupt(text: str) -> None:
        if "loss" in text:
            raise KeyboardInterrupt

    run("a bad b")
    assert ended.pop("bad", "")[:26] == "the batch of 1000 is large" and ended == {"a": None, "b": None}
    before = (tmp_path / "a" / "summary.json").stat().st_mtime_ns
    ended.clear()
    steps = []
    for _ in range(2):  # it is stopped, goes on, and is stopped again
        with pytest.raises(KeyboardInterrupt):
            run("a long", stops=True)
        summary: dict[str, Any] = json.loads((tmp_path / "long" / "summary.json").read_text())
        steps.append(summary["steps"])
        assert (summary["status"], summary["devices"]) == ("stopped", 1)
    assert 0 < steps[0] < steps[1] < 40_000
    assert ended == {"a": None} and (tmp_path / "a" / "summary.json").stat().st_mtime_ns == before
