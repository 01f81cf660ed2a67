"""How a run stands, and how often it was started again, in its report."""

import contextlib
from pathlib import Path

import pytest

from convoy.training.lock import locked
from report.made_runs import ENVIRONMENT, metrics, summary, write_run
from report.test_report import EVIL, page


def test_restarts_are_named(tmp_path: Path) -> None:
    restarts = [
        {"started": "2026-03-01T10:05:00+00:00", "after": 1200, "devices": 2, "plan": "sample=2"},
        {"started": "2026-03-01T10:09:00+00:00", "after": 1340, "devices": 3, "plan": EVIL},
    ]
    found = page(write_run(tmp_path / "again", environment={**ENVIRONMENT, "restarts": restarts}))
    words = found.words.replace(" ", "")
    assert "Startedagain(2)WhenAfterupdatesDevicesPlan2026-03-0110:05UTC1,2002sample=2" in words
    assert "2026-03-0110:09UTC1,3403<script>alert" in words
    assert found.words.count("sample=2") == 1  # not among the facts on the machine once more
    for name, damaged in (("none", []), ("word", "often"), ("words", ["once", None]), ("empty", [{}])):
        found = page(write_run(tmp_path / name, environment={**ENVIRONMENT, "restarts": damaged}))
        assert ("Started again" in found.words) is (name == "empty")


def test_a_restart_on_data_from_another_place_is_named(tmp_path: Path) -> None:
    restarts = [{"started": "2026-03-01T10:05:00+00:00", "after": 1200, "devices": 2, "plan": "sample=2"}]
    restarts.append({**restarts[0], "data": f"/mnt/{EVIL}"})
    found = page(write_run(tmp_path, environment={**ENVIRONMENT, "restarts": restarts}))
    words = found.words.replace(" ", "")
    assert "DevicesPlanData2026" in words and f"sample=2/mnt/{EVIL}".replace(" ", "") in words


def test_a_run_that_failed_says_why_and_how_to_go_on(tmp_path: Path) -> None:
    results = summary(status="failed", error=f"KeyError: {EVIL}", steps=31)
    found = page(write_run(tmp_path, lines=metrics(updates=31), results=results))
    assert "report Failed" in found.words
    assert (
        f"The run failed after 31 of 124 updates (25 %): KeyError: {EVIL}; --resume goes on from its last checkpoint."
        in found.words
    )


def test_how_to_go_on_is_said_once(tmp_path: Path) -> None:
    why = "rank 0 failed: it was ended by SIGKILL; --resume goes on from the newest checkpoint"
    found = page(write_run(tmp_path, lines=metrics(updates=31), results=summary(status="failed", error=why, steps=31)))
    assert f"The run failed after 31 of 124 updates (25 %): {why}." in found.words


@pytest.mark.parametrize(
    ("state", "word", "sentence"),
    [
        ("training", "Running", "The run was still going on when this page was written."),
        ("killed", "Broken off", "as one does that is killed; --resume goes on from its last checkpoint."),
        ("unknown", "Running", "or had been killed: then --resume goes on from its last checkpoint."),
    ],
)
def test_a_run_that_was_killed_is_not_called_running(tmp_path: Path, state: str, word: str, sentence: str) -> None:
    run = write_run(tmp_path, lines=metrics(updates=31), results=summary(status="running", steps=31))
    with contextlib.ExitStack() as stack:
        if state != "unknown":
            stack.enter_context(locked(run))
        if state == "killed":
            stack.close()
        found = page(run)
    assert f"report {word}" in found.words
    assert sentence in found.words
