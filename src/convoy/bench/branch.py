"""The next stretch of a run in several batches: up to which the loss over samples stays what it is with small ones."""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from convoy.bench.batches import agreement
from convoy.bench.jobs import Job, Jobs
from convoy.checkpoint.files import RECORD, sha256
from convoy.checkpoint.store import CheckpointStore
from convoy.errors import ConvoyError
from convoy.files import write_json, write_text, writing
from convoy.recipe.optim import ConstantConfig, rate_factor
from convoy.recipe.recipe import load_recipe
from convoy.recipe.schema import Duration
from convoy.report.run import read_metrics
from convoy.run.directory import RunDirectory
from convoy.run.records import MetricsLine
from convoy.training.derived import resolve
from convoy.training.finite import ADVICE
from convoy.training.resume import check_extension, check_same

_LINES, _TOLERANCE = 20, 0.05  # losses of a stretch; and the share of the lowest that a useful batch may be above it


def branches_of(run: Path, batches: list[int], epochs: float, at: int | None, folder: Path) -> tuple[int, list[Job]]:
    """The update of a run after which the branches begin, its newest checkpoint with a rate above 0 unless somebody
    says another, and the branches: each with the rate of that update, scaled as the optimizer does, all the time."""
    old = RunDirectory(run)
    begun, num_train = load_recipe(str(old.config)), old.summary().get("num_train")
    there = CheckpointStore(old.checkpoints).steps()
    if not there or not isinstance(num_train, int):
        raise ConvoyError(f"{run} has no checkpoint to branch off from: train it further, or keep more of them")
    if batches[-1] > num_train:
        raise ConvoyError(f"--batches {batches[-1]} is more than the {num_train:,} training images: leave it out")
    was = resolve(begun, num_train)
    steps = [step for step in there if (was.schedule.lr(step) > 0 if at is None else step == at)]
    if not steps:
        why = "has ended with a learning rate of 0" if at is None else f"has no checkpoint of update {at}"
        raise ConvoyError(f"{run} {why}: name a checkpoint with --at (there are {', '.join(map(str, there))})")
    step, jobs = steps[-1], []
    for batch in batches:
        rate = was.schedule.lr(step) * rate_factor(begun.optimizer, batch / begun.batch)
        changes: dict[str, Any] = {
            "batch": batch,
            "microbatch": begun.microbatch or -(-begun.batch // (begun.microbatches or 1)),
            "microbatches": None,
            "extends": str(run.resolve()),
            "extends_at": step,
            "target": None,
            "epochs": Duration(round(step / was.updates_per_epoch + epochs, 9), "ep"),
            "evaluate_every": Duration(epochs, "ep"),
            "log_every": Duration(epochs / _LINES, "ep"),
            "optimizer": begun.optimizer.model_copy(update={"lr": float(f"{rate:.6g}"), "base_lr": None}),
            "schedule": ConstantConfig(name="constant"),
            "parallel": begun.parallel.model_copy(update={"devices": 1, "plan": None, "shares": None}),
        }
        recipe = begun.model_copy(update=changes)
        now = resolve(recipe, num_train)
        if now.total_updates - round(step * now.updates_per_epoch / was.updates_per_epoch) < 2:
            raise ConvoyError(f"--epochs {epochs:g} is less than two updates of a batch of {batch}: give more epochs")
        check_extension(recipe)
        jobs.append(Job(folder / f"batch-{batch}-at-{step}-{epochs:g}ep", recipe))
    return step, jobs


def check_kept(run: Path, step: int, jobs: list[Job]) -> None:
    """Refuse a folder with branches of another recipe, or of the run as it was before somebody trained it anew; note of
    which checkpoint those are that come."""
    checksum = sha256(CheckpointStore(RunDirectory(run).checkpoints).place(step) / RECORD)
    folder, note = jobs[0].out.parent, jobs[0].out.with_name(f"at-{step}.sha256")
    if note.exists() and note.read_text(encoding="utf-8") != checksum:
        raise ConvoyError(
            f"{folder} has branches of another checkpoint after update {step}, as {run} was trained anew: give another "
            "--out, or remove that folder"
        )
    for begun, recipe in ((RunDirectory(job.out), job.recipe) for job in jobs):
        if begun.is_run():
            check_same(recipe, load_recipe(str(begun.config)), begun)
    with writing(note, "choose another --out"):
        folder.mkdir(parents=True, exist_ok=True)
        write_text(note, checksum)


def mean_loss(lines: Sequence[MetricsLine], after: float) -> float:
    """That of the updates in lines after some epochs: each is the mean of those since the line before it."""
    late = [pair for pair in pairwise(lines) if pair[1].loss is not None and (pair[1].epoch or 0) > after]
    return statistics.fmean((line.loss or 0.0 for _, line in late), (line.step - before.step for before, line in late))


def over_the_lowest(losses: Sequence[float | None]) -> list[float | None]:
    """By which part of the lowest each loss is above it, also where one's own is below 0 or 0."""
    there = [loss for loss in losses if loss is not None]
    lowest, scale = min(there), abs(min(there)) or max(there) or 1.0
    return [None if loss is None else (loss - lowest) / scale for loss in losses]


def train_branches(run: Path, jobs: list[Job], epochs: float, runner: Jobs) -> dict[str, Any]:
    """Train all branches, and compare them by the mean training loss over the last half of the stretch, which are the
    same samples in all and more of them than a test has; None where the rate was too high."""
    outcomes, rows = runner.train(lambda _: jobs), list[dict[str, Any]]()
    for job in jobs:
        failure, loss = outcomes[job.out].failure, None
        if failure is None:
            loss = mean_loss(read_metrics(job.out / "metrics.jsonl").train, job.recipe.epochs.value - epochs / 2)
        elif ADVICE not in failure:
            raise ConvoyError(f"{job.out.name} was not trained: {failure}")
        row = {"batch": job.recipe.batch, "rate": job.recipe.optimizer.lr, "loss": loss}
        rows.append(row | {f"test_{key}": outcomes[job.out].summary.get(key) for key in ("loss", "top1")})
    if all(row["loss"] is None for row in rows):
        raise ConvoyError("the loss of every branch stopped being finite: name smaller batches")
    for row, over in zip(rows, over_the_lowest([row["loss"] for row in rows]), strict=True):
        row["over_the_lowest"] = over
    useful = max(row["batch"] for row in rows if row["loss"] is not None and row["over_the_lowest"] <= _TOLERANCE)
    noise = RunDirectory(run).summary().get("noise_scale")
    document = {"run": str(run), "rows": rows, "useful": useful, "noise_scale": noise}
    sentence = agreement({"the branches": useful, "the gradient noise scale": noise})
    document["sentence"] = sentence or f"The largest useful batch is about {useful} by the branches."
    write_json(jobs[0].out.parent / "branches.json", document)
    return document
