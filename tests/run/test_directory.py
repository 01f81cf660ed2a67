"""The folder of a run: one process at a time trains in it, nothing of others is overwritten, and its end is noticed."""

import json
from pathlib import Path

import pytest

from convoy.errors import ConvoyError
from convoy.run.directory import LOCK, RunDirectory, is_locked


def test_those_who_could_train_there_can_ask_who_does(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert is_locked(tmp_path) is None  # nobody ever trained here
    tmp_path.chmod(0o775)
    with run.lock():  # only those who could train there can open it
        assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o660
        assert is_locked(tmp_path) is True
    assert is_locked(tmp_path) is False


def test_nothing_is_overwritten_but_what_a_process_left_that_was_killed_as_it_began(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.check_free()
    run.create("seed: 0\n", {"device": "cpu"})
    for status, words in (("failed", "which failed: add --resume"), ("finished", "which is finished: choose")):
        run.summary_file.write_text(json.dumps({"status": status}))
        with pytest.raises(ConvoyError, match=f"already holds a run, {words}"):
            run.check_free()
    begun = RunDirectory(tmp_path / "begun")
    begun.path.mkdir()
    for name in (LOCK, ".environment.json.4711.tmp", ".config.yaml.4711.tmp"):
        (begun.path / name).write_text("{")
    begun.check_free()
    begun.sweep()
    assert [entry.name for entry in begun.path.iterdir()] == [LOCK]
    begun.environment.write_text("{}")
    with pytest.raises(ConvoyError, match="is not empty"):
        begun.check_free()
