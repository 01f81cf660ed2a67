"""One process at a time trains in a folder."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from convoy.errors import ConvoyError, GoneError
from convoy.training import lock
from convoy.training.run_directory import RunDirectory

HOLD = """
import sys, time
from pathlib import Path
from convoy.training.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


def test_a_second_one_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    assert lock.is_locked(tmp_path) is None  # nobody ever trained here
    with lock.locked(tmp_path):
        assert lock.is_locked(tmp_path) is True
        words = rf"another process is training in {tmp_path} \(process {os.getpid()} on host .+\): wait for its end"
        with pytest.raises(ConvoyError, match=words), lock.locked(tmp_path):
            pass
        assert lock.is_locked(tmp_path) is True
    assert lock.is_locked(tmp_path) is False
    with lock.locked(tmp_path):
        pass


def test_it_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    assert lock.is_locked(tmp_path) is True
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert lock.is_locked(tmp_path) is False
    with lock.locked(tmp_path):
        pass


def test_who_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    said: list[str] = []
    ended = threading.Event()

    def train() -> None:
        with lock.locked(tmp_path):
            began.set()
            ended.wait(60)

    began = threading.Event()
    thread = threading.Thread(target=train)
    thread.start()
    began.wait(60)

    def tell(sentence: str) -> None:
        said.append(sentence)
        ended.set()

    with lock.locked(tmp_path, 60, tell):
        assert ended.is_set()
    thread.join()
    assert [sentence.partition(" that ")[0] for sentence in said] == ["waiting for the end of another process"]


def test_what_was_forked_meanwhile_does_not_keep_it(tmp_path: Path) -> None:
    with lock.locked(tmp_path):
        child = os.fork()
        if child == 0:
            time.sleep(100)
            os._exit(0)
    try:
        assert lock.is_locked(tmp_path) is False
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_file_system_without_locks_keeps_nobody_out_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    said: list[str] = []
    with lock.locked(tmp_path, tell=said.append):
        assert lock.is_locked(tmp_path) is None
    assert said == [f"the file system of {tmp_path} knows no locks: see to it that no other process trains there"]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConvoyError, match=r"cannot write to .*: choose another --out"), lock.locked(tmp_path / "none"):
        pass


@pytest.mark.parametrize(("folder", "file"), [(0o755, 0o600), (0o775, 0o660), (0o700, 0o600), (0o777, 0o666)])
def test_only_those_who_could_train_there_can_open_it(tmp_path: Path, folder: int, file: int) -> None:
    tmp_path.chmod(folder)
    (tmp_path / lock.NAME).touch(0o644)  # as it was made before
    with lock.locked(tmp_path):
        assert (tmp_path / lock.NAME).stat().st_mode & 0o777 == file


def _moved(run: Path) -> None:
    run.rename(run.with_name("there"))


def _replaced(run: Path) -> None:
    _moved(run)
    run.mkdir()
    (run / "notes").touch()
    shutil.rmtree(run.with_name("there"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: None, ""),
        (shutil.rmtree, "after 7 updates: it was removed; nothing is there now$"),
        (_moved, "it was moved; go on with convoy train .*/there --resume$"),
        (_replaced, "it was removed; there is now notes$"),
        (lambda run: (run / lock.NAME).unlink(), "its .lock was removed; there is now config.yaml$"),
    ],
)
def test_a_folder_that_has_gone_is_noticed(tmp_path: Path, change: Callable[[Path], None], words: str) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create("seed: 0\n", {})
    run.environment.unlink()
    with run.lock():
        change(run.path)
        if not words:
            run.check_there(7)
            return
        with pytest.raises(GoneError, match=words):
            run.check_there(7)
    run.check_there(7)  # of no interest any more
