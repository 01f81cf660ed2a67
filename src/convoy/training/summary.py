"""`summary.json`, which says how a run stands, also when it fails."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from convoy.errors import ConvoyError
from convoy.files import write_json
from convoy.terminal import losses
from convoy.training.evaluate import Evaluation
from convoy.training.records import RunSummary, SkippedImage, Status
from convoy.training.run_directory import RunDirectory
from convoy.training.session import Session


@dataclass
class RunProgress:
    """What the loop remembers over a stop; stored in every checkpoint."""

    time_s: float = 0.0  # of the run so far, over all resumptions
    train_s: float = 0.0  # of it without evaluations and checkpoints
    data_wait_s: float = 0.0  # of that, spent waiting for data, after the first update
    start_s: float = 0.0  # of the first update, with the start of the processes that load data
    num_images: int = 0  # training images seen
    best_top1: float | None = None
    best_step: int | None = None
    to_evaluate: bool = False  # an evaluation was stopped, and is to be done again
    left_out: int = 0  # updates not made, because loss or gradient were not finite
    bad_images: list[dict[str, str]] = field(default_factory=list)  # that could not be read: name, reason, split
    checkpoints: dict[str, Any] = field(default_factory=dict)  # their `CheckpointTally`

    def add_bad(self, name: str, reason: str, split: str) -> None:
        """Remember a bad picture, once."""
        entry = {"name": name, "reason": reason, "split": split}
        if entry not in self.bad_images:
            self.bad_images.append(entry)


def write_summary(
    run: RunDirectory,
    session: Session,
    progress: RunProgress,
    status: Status,
    steps: int,
    evaluation: Evaluation | None,
    error: str | None = None,
) -> None:
    """Write `summary.json` after `steps` updates; `evaluation` is the latest one, if any, `error` why it failed."""
    run.check_there(steps)
    recipe, data, counts = session.recipe, session.data, session.counts
    summary = RunSummary.model_construct(  # nothing in it may end a run
        status=status,
        error=error,
        model=recipe.model.name,
        data=data.name,
        devices=session.ranks.num,
        plan=str(session.plan),
        approximate=recipe.parallel.approximation(session.plan),
        parameters=counts.parameters,
        flops=counts.flops,
        num_train=len(data.train),
        num_test=len(data.test),
        steps=steps,
        total_steps=session.quantities.total_updates,
        epochs=steps / session.quantities.updates_per_epoch,
        top1=evaluation.top1 if evaluation else None,
        top5=evaluation.top5 if evaluation else None,
        loss=evaluation.loss if evaluation else None,
        best_top1=progress.best_top1,
        best_step=progress.best_step,
        time_s=progress.time_s,
        images_per_s=progress.num_images / progress.train_s if progress.train_s else None,
        data_wait_share=progress.data_wait_s / after if (after := progress.train_s - progress.start_s) > 0 else 0.0,
        checkpoints=progress.checkpoints,
        left_out=progress.left_out,
        bad_images=[SkippedImage(**entry) for entry in progress.bad_images],
        derived=session.derived,
        stages=session.stages,
        notes=[*session.notes, *losses()],
    )
    write_json(run.summary_file, summary.model_dump())


def note_failure(run: RunDirectory, sentence: str) -> None:
    """Put into the summary that is there that the run failed, and why; a run that is finished stays so. An OSError
    where it cannot be written.
    """
    summary = run.summary()
    if summary and summary.get("status") != "finished":
        write_json(run.summary_file, {**summary, "status": "failed", "error": sentence})


WRITE_S = 5.0  # seconds that a file system is given to answer when the run has failed


def briefly(write: Callable[[], None], seconds: float = WRITE_S) -> None:
    """Write something if that can be, but do not wait for a file system that does not answer."""

    def try_it() -> None:
        with contextlib.suppress(Exception):
            write()

    thread = threading.Thread(target=try_it, daemon=True, name="convoy-summary")
    thread.start()
    thread.join(seconds)


class Witness:
    """Notes from outside why a run's processes failed: those that are killed cannot do so themselves. The processes are
    about to begin the run, or to go on with it.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._before = self._stamp()

    def note(self, sentence: str) -> None:
        """Put it into the summary, if it was they who wrote that, and nobody goes on with the run already.

        A run that was stopped stays so: all that it had done was saved before.
        """
        with contextlib.suppress(OSError, ConvoyError):
            if self._stamp() not in (None, self._before):  # None: the run directory has gone, and stays so
                with self._run.lock():
                    if self._run.summary().get("status") != "stopped":
                        note_failure(self._run, sentence)

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self._run.summary_file.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns
