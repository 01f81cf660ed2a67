"""How a run stands, in one file: `summary.json`."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from convoy.files import write_json
from convoy.training.evaluate import Evaluation
from convoy.training.session import Session
from convoy.training.storage.run_directory import RunDirectory

Status = Literal["running", "stopped", "finished", "failed"]


@dataclass
class Progress:
    """What the loop remembers over a stop; stored in every checkpoint.

    Attributes:
        time_s: seconds of the run so far, over all resumptions.
        train_s: seconds of them without evaluations and checkpoints.
        data_wait_s: seconds of those spent waiting for data.
        num_images: training images seen.
        best_top1, best_step: the best evaluation so far.
        to_evaluate: an evaluation was stopped, and is to be done again.
        left_out: updates that were not made, because loss or gradient were not finite.
        bad_images: pictures that could not be read: name, reason, split.
        checkpoints: what they have cost (`convoy.training.checkpoints.saver.Tally`).
    """

    time_s: float = 0.0
    train_s: float = 0.0
    data_wait_s: float = 0.0
    num_images: int = 0
    best_top1: float | None = None
    best_step: int | None = None
    to_evaluate: bool = False
    left_out: int = 0
    bad_images: list[dict[str, str]] = field(default_factory=list)
    checkpoints: dict[str, Any] = field(default_factory=dict)

    def add_bad(self, name: str, reason: str, split: str) -> None:
        """Remember a bad picture, once."""
        entry = {"name": name, "reason": reason, "split": split}
        if entry not in self.bad_images:
            self.bad_images.append(entry)


def write_summary(
    run: RunDirectory,
    session: Session,
    progress: Progress,
    status: Status,
    steps: int,
    evaluation: Evaluation | None,
    error: str | None = None,
) -> None:
    """Write `summary.json` after `steps` updates; `evaluation` is the latest one, if any, `error` why it failed."""
    recipe, data, counts = session.recipe, session.data, session.counts
    summary: dict[str, Any] = {
        "status": status,
        "error": error,
        "model": recipe.model.name,
        "data": data.name,
        "devices": session.devices.num,
        "plan": str(session.plan),
        "approximate": recipe.parallel.approximate if session.devices.num > 1 else None,
        "parameters": counts.parameters,
        "flops": counts.flops,
        "num_train": len(data.train),
        "num_test": len(data.test),
        "steps": steps,
        "total_steps": session.quantities.total_updates,
        "epochs": steps / session.quantities.updates_per_epoch,
        "top1": evaluation and evaluation.top1,
        "top5": evaluation and evaluation.top5,
        "loss": evaluation and evaluation.loss,
        "best_top1": progress.best_top1,
        "best_step": progress.best_step,
        "time_s": progress.time_s,
        "images_per_s": progress.num_images / progress.train_s if progress.train_s else None,
        "data_wait_share": progress.data_wait_s / progress.train_s if progress.train_s else 0.0,
        "checkpoints": progress.checkpoints,
        "left_out": progress.left_out,
        "bad_images": progress.bad_images,
        "derived": [asdict(row) for row in session.derived],
        "notes": session.notes,
    }
    write_json(run.summary_file, summary)


def note_failure(run: RunDirectory, sentence: str) -> None:
    """Put into the summary that is there that the run failed, and why; a run that is finished stays so.

    Raises:
        OSError: it cannot be written.
    """
    found = run.summary()
    if found and found.get("status") != "finished":
        write_json(run.summary_file, {**found, "status": "failed", "error": sentence})
