"""Sentences about a run that a reader of its numbers has to know: what is missing, cut short, skewed or skipped."""

import numpy as np

from convoy.experiments import formats
from convoy.experiments.metrics import Line, column
from convoy.experiments.plots import data_wait_shares
from convoy.experiments.run_directory import Run


def remarks(run: Run) -> list[str]:
    """The sentences, the most important first; none for a run that is complete and healthy."""
    found = [
        _status(run),
        *_not_finite("training", run.metrics.train),
        *_not_finite("test", run.metrics.test),
        _no_test(run),
        _bad_images(run),
        _data_wait(run),
        _soft_targets(run),
        _cut(run),
    ]
    return [sentence for sentence in found if sentence]


def status(run: Run) -> tuple[str, str]:
    """A word for the state of the run, and its kind: good, warn or open."""
    known = run.summary.status if run.summary is not None else None
    if known == "finished":
        return "Finished", "good"
    if known == "stopped":
        return "Stopped early", "warn"
    if known == "failed":
        return "Failed", "warn"
    if known == "running":
        return ("Broken off", "warn") if run.training is False else ("Running", "open")
    return "No summary", "warn"


def _status(run: Run) -> str:
    summary = run.summary
    if summary is None or summary.status is None:
        return (
            "There is no summary: the run is still going on, or it ended without being able to write one. "
            "What is shown is what it had written."
        )
    if summary.status == "finished":
        return ""
    goes_on = "--resume goes on from its last checkpoint"
    if summary.status == "running":
        if run.training is False:
            return f"The run has ended without a word, as one does that is killed; {goes_on}."
        known = "" if run.training else f", or had been killed: then {goes_on}"
        return f"The run was still going on when this page was written{known}."
    ended = "failed" if summary.status == "failed" else "was stopped"
    steps, total, why = summary.steps, summary.total_steps, f": {summary.error}" if summary.error else ""
    if "--resume" not in why:  # many reasons say how to go on
        why += f"; {goes_on}"
    if steps is None or not total:
        return f"The run {ended} before its end{why}."
    return (
        f"The run {ended} after {formats.count(steps)} of {formats.plural(total, 'update')} "
        f"({formats.percent(steps / total, 0)}){why}."
    )


def _not_finite(split: str, lines: list[Line]) -> list[str]:
    lost = np.isnan(column(lines, "loss"))
    if not lost.any():
        return []
    first = lines[int(lost.argmax())].step
    return [
        f"The {split} loss was not a finite number (NaN or infinite) in {formats.count(int(lost.sum()))} of "
        f"{formats.plural(len(lines), 'line')} of the record, first at update {formats.count(first)}; "
        "the curves have a gap there."
    ]


def _no_test(run: Run) -> str:
    if not run.metrics.train and not run.metrics.test:
        return "No metrics have been recorded yet: the run ended, or was looked at, before its first line."
    if not run.metrics.test and run.evaluation is None:
        return "The net has not been tested yet, so there is no test curve and no test accuracy."
    return ""


def _bad_images(run: Run) -> str:
    number = len(run.summary.bad_images) if run.summary is not None else 0
    if not number:
        return ""
    return f"{formats.plural(number, 'image')} could not be read and {'was' if number == 1 else 'were'} skipped."


def _data_wait(run: Run) -> str:
    share = run.summary.data_wait_share if run.summary is not None else None
    if share is None:
        shares = data_wait_shares(run)
        share = float(np.nanmean(shares)) if np.isfinite(shares).any() else 0.0
    if share < 0.1:
        return ""
    return (
        f"Training waited for data in {formats.percent(share, 0)} of its time: "
        "more loader processes (data.workers), smaller pictures on disk or less augmentation would make it faster."
    )


def _soft_targets(run: Run) -> str:
    mixing = [name for name in ("mixup", "cutmix") if _positive(run.setting(f"data.mix.{name}"))]
    if mixing:
        return (
            f"Training images are blended ({' and '.join(mixing)}), so training loss and error "
            "cannot be compared with those of the test split."
        )
    if _positive(smoothing := run.setting("loss.label_smoothing")):
        return (
            f"Label smoothing of {formats.value(smoothing)} keeps the training loss above zero even for a perfect net."
        )
    return ""


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _cut(run: Run) -> str:
    return (
        "The last line of metrics.jsonl was cut off in the middle of writing and is left out."
        if run.metrics.cut
        else ""
    )
