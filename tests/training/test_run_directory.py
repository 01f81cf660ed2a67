"""The folder of a run: one process at a time trains in it, nothing of others is overwritten, and its end is noticed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from convoy.errors import ConvoyError, GoneError
from convoy.training import RunDirectory
from convoy.training.run_directory import LOCK, is_locked
from ranks import run_ranks
from training.scenarios import files
from whole_runs import train_here

running = sys.modules["convoy.training.run"]
TWO = {"epochs": "2ba"}
ANOTHER = "another process is training"

HOLD = """
import sys, time
from pathlib import Path
from convoy.training import RunDirectory
with RunDirectory(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(100)
"""


def test_those_who_could_train_there_can_ask_who_does(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert is_locked(tmp_path) is None  # nobody ever trained here
    tmp_path.chmod(0o775)
    with run.lock():  # only those who could train there can open it
        assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o660
        assert is_locked(tmp_path) is True
    assert is_locked(tmp_path) is False


def test_it_ends_with_a_process_that_is_killed_and_is_not_kept_by_what_it_forked(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    assert is_locked(tmp_path) is True
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert is_locked(tmp_path) is False
    with RunDirectory(tmp_path).lock():
        child = os.fork()
        if child == 0:
            time.sleep(100)
            os._exit(0)
    try:
        assert is_locked(tmp_path) is False
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _moved(run: Path) -> None:
    run.rename(run.with_name("there"))


GONE: list[tuple[Callable[[Path], object], str]] = [
    (lambda run: None, ""),
    (shutil.rmtree, "after 7 updates: it was removed; nothing is there now$"),
    (_moved, "it was moved; go on with convoy train .*/there --resume$"),
    (lambda run: (run / LOCK).unlink(), "its .lock was removed; there is now config.yaml$"),
]


def test_a_folder_that_has_gone_is_noticed(tmp_path: Path) -> None:
    for number, (change, words) in enumerate(GONE):
        run = RunDirectory(tmp_path / str(number) / "run")
        run.create("seed: 0\n", {})
        run.environment.unlink()
        with run.lock():
            change(run.path)
            with pytest.raises(GoneError, match=words) if words else nullcontext():
                run.check_there(7)
        run.check_there(7)  # of no interest any more


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


def _held(data: Path, out: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "LOCK_PATIENCE_S", 0.0)
        with pytest.raises(ConvoyError) as caught:
            train_here(data, out, TWO, resume=True)
    return str(caught.value)


def test_a_second_start_ends_with_a_sentence_and_changes_nothing(data: Path, tmp_path: Path) -> None:
    out, begun = tmp_path / "run", tmp_path / "begun"
    train_here(data, out, TWO)
    with RunDirectory(out).lock():
        before = files(out)
        first, second = run_ranks(_held, 2, data, out)  # all ranks of the second end
        words = rf"{ANOTHER} in {out} \(process {os.getpid()} on host .+\): wait for its end"
        assert first == second and re.match(words, first) and files(out) == before
    begun.mkdir()  # both begin at once
    with RunDirectory(begun).lock(), pytest.raises(ConvoyError, match=ANOTHER):
        train_here(data, begun, TWO)
    assert [path.name for path in begun.iterdir()] == [LOCK]
