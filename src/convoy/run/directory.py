"""The folder of one run: what lies where, that nobody's earlier results are overwritten, and that one process at a time
trains in it.

The last by an advisory lock on a file in it, which ends with its process. The file stays: a lock on a file that is
removed keeps nobody out. NFS grants such a lock only on files open for writing, which a folder never is. It also tells
a run that goes on from one that was killed, and whether the folder is still the same one.
"""

import errno
import fcntl
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from convoy.errors import ConvoyError, GoneError
from convoy.files import stamp, unwritable, write_json, write_text, writing

LOCK = ".lock"
WRITE_S = 5.0  # seconds that a file system is given to answer when the run has failed
_LOOK_S = 0.5  # a wait: another process may just be looking whether the lock is free
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_LEFT_OVER = (LOCK, ".environment.json.", ".config.yaml.", ".convoy-")  # of a process that was killed as it began


class RunDirectory:
    """Paths of a run's files. `config.yaml` makes a folder a run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"  # the resolved recipe
        self.environment = path / "environment.json"  # on what, by whom and when the run was begun
        self.plan = path / "plan.yaml"  # by which the devices divided the work, the last time
        self.prediction = path / "prediction.json"  # of an update, beside what was measured
        self.trace = path / "trace.json"  # the same for viewers of traces: a watched update, and the predicted one
        self.diagnosis = path / "diagnosis.json"  # what holds the run back, and what would help
        self.metrics = path / "metrics.jsonl"  # one JSON object a line
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights.safetensors"  # the final ones, whole tensors under the model's own names
        self.evaluation = path / "evaluation.json"  # the final one
        self.summary_file = path / "summary.json"  # how the run stands
        self._locked: int | None = None  # the open file of the lock that this process has

    def is_run(self) -> bool:
        """Whether a run was begun here."""
        return self.config.is_file()

    def begun_by(self) -> dict[str, Any]:
        """What `environment.json` says of who began the run; empty where that is not to be read."""
        return _read(self.environment)

    def summary(self) -> dict[str, Any]:
        """What `summary.json` says of how the run stands; empty where that is not to be read."""
        return _read(self.summary_file)

    def add_restart(self, restart: dict[str, Any]) -> None:
        """Note in `environment.json` how the run was started again."""
        begun = self.begun_by()
        before = begun.get("restarts")
        write_json(self.environment, {**begun, "restarts": [*(before if isinstance(before, list) else []), restart]})

    def note_failure(self, sentence: str, unless: str = "finished") -> None:
        """Put into the summary that is there that the run failed, and why; a run that is finished stays so. An OSError
        where it cannot be written.
        """
        summary = self.summary()
        if summary and summary.get("status") not in ("finished", unless):
            write_json(self.summary_file, {**summary, "status": "failed", "error": sentence})

    def check_run(self) -> None:
        """Refuse a folder that holds no run."""
        if not self.is_run():
            raise ConvoyError(
                f"{self.path} is no run directory (it has no config.yaml): give the --out folder of convoy train"
            )
        if not self.config.stat().st_size:
            raise ConvoyError(f"{self.config} is empty, so nobody knows what was trained: put the file back")

    def check_trained(self, checkpoint: object = None) -> None:
        """Refuse a folder without a trained network, unless a checkpoint with weights of its own is to be used."""
        self.check_run()
        if checkpoint is None and not self.weights.is_file():
            newest = ", or use its newest checkpoint (--checkpoint last)" if self.checkpoints.is_dir() else ""
            raise ConvoyError(
                f"{self.path} has no weights.safetensors yet: finish the run with convoy train {self.path} "
                f"--resume{newest}"
            )

    def check_free(self, mine: bool = False) -> None:
        """Refuse to begin a run where something is already, or nothing can be written; `mine` says that this process
        has the lock, so that nobody else trains there.
        """
        path = self.path
        if self.is_run():
            if not mine and is_locked(path):
                raise ConvoyError(_busy(path))
            status = self.summary().get("status")
            if status == "finished":
                raise ConvoyError(f"{path} already holds a run, which is finished: choose another --out")
            failed = ", which failed" if status == "failed" else ""
            ways = "add --resume to go on with it, or choose another --out"
            raise ConvoyError(f"{path} already holds a run{failed}: {ways}")
        if path.is_file():
            raise ConvoyError(f"{path} is a file: choose a folder for --out")
        for entry in path.iterdir() if path.is_dir() else ():
            is_begun = entry.name == self.environment.name and "convoy" in self.begun_by()
            if not is_begun and not entry.name.startswith(_LEFT_OVER):
                raise ConvoyError(f"the folder {path} is not empty: choose a new one for --out")
        if not mine and (reason := unwritable(path)) is not None:
            raise ConvoyError(f"cannot write to {path} ({reason}): choose another --out")

    def create(self, config: str, environment: dict[str, Any]) -> None:
        """Write how the run was begun."""
        with writing(self.path, "choose another --out"):
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.environment, environment)
            write_text(self.config, config)

    def sweep(self) -> None:
        """Remove what killed processes left half-written; nobody may be writing."""
        for unfinished in self.path.glob(".*.tmp"):
            with suppress(OSError):
                unfinished.unlink()

    def forget_metrics_after(self, step: int, and_evaluation: bool = False) -> None:
        """Drop the metrics of updates after `step`, which will be done again, and with `and_evaluation` that of the
        evaluation after it; a half-written last line goes too.
        """
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                again = and_evaluation and entry["split"] != "train"
                if entry["step"] < step or (entry["step"] == step and not again):
                    kept.append(line)
        write_text(self.metrics, "".join(f"{line}\n" for line in kept))

    @contextmanager
    def lock(self, patience_s: float = 0.0, tell: Callable[[str], None] = lambda sentence: None) -> Iterator[None]:
        """Keep other processes from training in this folder, which is made where it is missing, while entered; wait so
        many seconds for one that is about to end."""
        with writing(self.path, "choose another --out"):
            self.path.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with suppress(OSError):  # that of somebody else stays as it is
                # Whoever can open the file can lock it, so only those may who could train in the folder.
                mode = self.path.stat().st_mode
                os.fchmod(file, 0o600 | 0o060 * bool(mode & stat.S_IWGRP) | 0o006 * bool(mode & stat.S_IWOTH))
            began, told = time.monotonic(), False
            while (is_taken := _take(file, fcntl.LOCK_EX)) is False:
                waited_s = time.monotonic() - began
                if waited_s >= max(_LOOK_S, patience_s):
                    raise ConvoyError(_busy(self.path))
                if not told and waited_s > _LOOK_S:
                    told = True
                    tell(f"waiting for the end of another process that is training in {self.path}{_holder(self.path)}")
                time.sleep(0.1)
            if is_taken is None:
                tell(f"the file system of {self.path} knows no locks: see to it that no other process trains there")
            else:
                with suppress(OSError):  # say whose it is, if there is room
                    os.ftruncate(file, 0)
                    os.pwrite(file, json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode(), 0)
            self._locked = file
            yield
        finally:
            self._locked = None
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # closing would leave it to what was forked meanwhile
            os.close(file)

    def check_there(self, done: int) -> None:
        """Refuse to write, after so many updates, where the folder that this process has locked has gone.

        Below an unmounted disk a new one would fill another disk, and nobody takes half of one for a run.
        """
        if self._locked is None:
            return
        try:
            if os.path.samestat(os.fstat(self._locked), (self.path / LOCK).stat()):
                return
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                return  # whoever writes next hears what is wrong
        raise GoneError(
            f"{self.path} is not the folder any more that this run writes to, as was seen after {done:,} updates: "
            f"{_fate(self._locked, self.path)}"
        )

    def note_end(self, sentence: str, before: tuple[int, int, int] | None) -> None:
        """Put into the summary why the processes that trained here failed, where they could not do so themselves: if it
        was they who wrote it, after the `stamp` of `before`, and nobody goes on with the run already. A run that was
        stopped stays so: all that it had done was saved.
        """
        with suppress(OSError, ConvoyError):
            if stamp(self.summary_file) not in (None, before):  # None: the run directory has gone, and stays so
                with self.lock():
                    self.note_failure(sentence, unless="stopped")


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def is_locked(folder: Path) -> bool | None:
    """Whether a process trains in a folder now; None where that cannot be told."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        is_free = _take(file, fcntl.LOCK_SH)
    finally:
        os.close(file)
    return None if is_free is None else not is_free


def _take(file: int, kind: int) -> bool | None:
    """Whether this process has the lock now; None where the file system has none."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _busy(folder: Path) -> str:
    return f"another process is training in {folder}{_holder(folder)}: wait for its end, or choose another --out"


def _holder(folder: Path) -> str:
    """Who has signed last, in words."""
    holder = _read(folder / LOCK)
    return f" (process {holder['process']} on host {holder['host']})" if {"process", "host"} <= {*holder} else ""


def _fate(file: int, folder: Path) -> str:
    """What became of a folder, whose lock is open, and what there is in its place."""
    time.sleep(_LOOK_S)  # somebody may still be removing it
    names = []
    with suppress(OSError):
        names = sorted(entry.name for entry in folder.iterdir())
    there = f"there is now {', '.join(names[:6])}{', …' * (len(names) > 6)}" if names else "nothing is there now"
    with suppress(OSError):
        if os.fstat(file).st_nlink == 0:
            return f"{f'its {LOCK}' if 'config.yaml' in names else 'it'} was removed; {there}"
        place = Path(f"/proc/self/fd/{file}").readlink()
        if os.path.samestat(os.fstat(file), place.stat()):
            return f"it was moved; go on with convoy train {place.parent} --resume"
    return f"its disk was unmounted, or another put there; {there}; bring it back, then go on with --resume"


@contextmanager
def disk_explained(folder: Path, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Say in one sentence what is wrong with the disk that `folder` is on; `check` says whether that has gone."""
    try:
        yield
    except OSError as error:
        check()
        name = Path(str(error.filename)) if error.filename is not None else None
        if error.errno not in _FULL and (name is None or not name.is_relative_to(folder)):
            raise
        raise ConvoyError(
            f"cannot write to {name.parent if name else folder} ({error.strerror}): free what is in its way, "
            "then go on with --resume"
        ) from error


def briefly(write: Callable[[], None]) -> None:
    """Write something if that can be, but do not wait for a file system that does not answer."""

    def try_it() -> None:
        with suppress(Exception):
            write()

    thread = threading.Thread(target=try_it, daemon=True, name="convoy-summary")
    thread.start()
    thread.join(WRITE_S)
