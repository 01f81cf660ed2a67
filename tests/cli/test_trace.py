"""The trace that a run leaves behind: what was measured of an update beside what was predicted of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from convoy.training.observation import WATCHED


@pytest.mark.slow
def test_a_run_leaves_a_trace_with_its_prediction(tmp_path: Path) -> None:
    out = tmp_path / "run"
    line = ["train", "lenet", "--data", "mnist-mini", "--devices", "2", "--plan", "auto", "--batch", "32"]
    found = subprocess.run(
        [sys.executable, "-m", "convoy", *line, "--epochs", f"{WATCHED[0] + 1}ba", "--out", str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CONVOY_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"predicted rank 0", "measured rank 0", "measured rank 1"} <= set(names.values())
    calls: dict[str, set[str]] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] == "forward":
            calls.setdefault(names[event["pid"]], set()).add(event["name"])
    assert calls["predicted rank 0"] & calls["measured rank 0"], calls
    plan = json.loads((out / "summary.json").read_text())["plan"]  # as is best on this machine
    in_stages = plan.startswith("stage=")
    assert (calls["measured rank 0"] == calls["measured rank 1"]) is not in_stages
