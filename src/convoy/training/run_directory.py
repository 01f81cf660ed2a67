"""The folder of one run: what lies where, and that nobody's earlier results are overwritten."""

import errno
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.errors import ConvoyError
from convoy.files import unwritable, write_atomically, write_json, write_text
from convoy.training import lock

if TYPE_CHECKING:
    from torch import Tensor

    from convoy.checkpoint.files import Kinds

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


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


def save_weights(kinds: "Kinds", wholes: Iterable["Tensor"], path: Path) -> None:
    """Write a model's parameters and buffers, whole and under its own names, as `RunState.whole_weights` gives
    them."""
    from convoy.checkpoint.files import pieces

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.writelines(pieces(kinds, wholes))

    write_atomically(path, write)


_HALF_WRITTEN = (".environment.json.", ".config.yaml.", ".convoy-")


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
        self.tensorboard = path / "tensorboard"
        self._lock: lock.Lock | None = None

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
        found = self.begun_by()
        before = found.get("restarts")
        write_json(self.environment, {**found, "restarts": [*(before if isinstance(before, list) else []), restart]})

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
        path = self.path
        if checkpoint is None and not self.weights.is_file():
            newest = ", or use its newest checkpoint (--checkpoint last)" if self.checkpoints.is_dir() else ""
            raise ConvoyError(
                f"{path} has no weights.safetensors yet: finish the run with convoy train {path} --resume{newest}"
            )

    def check_free(self, mine: bool = False) -> None:
        """Refuse to begin a run where something is already; `mine` says that this process has the lock, so that nobody
        else trains there.
        """
        if self.is_run():
            raise ConvoyError(self._taken(mine))
        if self.path.is_file():
            raise ConvoyError(f"{self.path} is a file: choose a folder for --out")
        if self.path.is_dir() and not all(map(self._is_left_over, self.path.iterdir())):
            raise ConvoyError(f"the folder {self.path} is not empty: choose a new one for --out")

    def _taken(self, mine: bool) -> str:
        """What there is, and how to go on with it if that can be."""
        if not mine and lock.is_locked(self.path):
            return lock.busy(self.path)
        status = self.summary().get("status")
        if status == "finished":
            return f"{self.path} already holds a run, which is finished: choose another --out"
        failed = ", which failed" if status == "failed" else ""
        return f"{self.path} already holds a run{failed}: add --resume to go on with it, or choose another --out"

    def _is_left_over(self, entry: Path) -> bool:
        """Whether a process has left it that was killed while it began its run, which is no run yet."""
        if entry.name == self.environment.name:
            return "convoy" in self.begun_by()
        return entry.name == lock.NAME or entry.name.startswith(_HALF_WRITTEN)

    def check_writable(self) -> None:
        """Refuse a place where the run could not be written, before the work for it is done."""
        reason = unwritable(self.path)
        if reason is not None:
            raise ConvoyError(f"cannot write to {self.path} ({reason}): choose another --out")

    def make(self) -> None:
        """Make the folder."""
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConvoyError(f"cannot write to {self.path} ({error.strerror}): choose another --out") from error

    @contextmanager
    def lock(self, patience_s: float = 0.0, tell: Callable[[str], None] = lambda sentence: None) -> Iterator[None]:
        """Keep other processes from training in this folder, while entered; see `convoy.training.lock`."""
        with lock.locked(self.path, patience_s, tell) as self._lock:
            try:
                yield
            finally:
                self._lock = None

    def check_there(self, done: int) -> None:
        """Refuse to write, after so many updates, where the folder that this process has locked has gone.

        Below an unmounted disk a new one would fill another disk, and nobody takes half of one for a run.
        """
        if self._lock is not None:
            self._lock.check(done)

    def sweep(self) -> None:
        """Remove what killed processes left half-written; nobody may be writing."""
        for unfinished in self.path.glob(".*.tmp"):
            with suppress(OSError):
                unfinished.unlink()

    def create(self, config: str, environment: dict[str, Any]) -> None:
        """Write how the run was begun."""
        self.make()
        with self._writing():
            write_json(self.environment, environment)
            write_text(self.config, config)

    def forget_metrics_after(self, step: int, and_evaluation: bool = False) -> None:
        """Drop the metrics of updates after `step`, which will be done again, and with `and_evaluation` that of the
        evaluation after it; a half-written last line goes too.
        """
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
                again = and_evaluation and entry["split"] == "test"
                if entry["step"] < step or (entry["step"] == step and not again):
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue
        write_text(self.metrics, "".join(f"{line}\n" for line in kept))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
