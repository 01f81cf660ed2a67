"""The next stretch of a run in several batches: up to which the loss over samples stays what it is with small ones."""

import math
import statistics
from pathlib import Path
from typing import Any

from convoy.bench.jobs import Job, Jobs
from convoy.checkpoint.store import CheckpointStore
from convoy.errors import ConvoyError
from convoy.report.run_directory import read_metrics
from convoy.training import Recipe, RunDirectory
from convoy.training.derived import resolve
from convoy.training.gradients import ADVICE
from convoy.training.optim import ConstantConfig, rate_factor
from convoy.training.recipe import load_recipe
from convoy.training.resume import check_extension
from convoy.training.schema import Duration

_PARTS = 4  # of a stretch, whose losses are shown


def branches_of(run: Path, batches: list[int], epochs: float, at: int | None) -> tuple[int, dict[int, Recipe]]:
    """The update of a run after which the branches begin, its newest checkpoint with a rate above 0 unless somebody
    says another, and the recipe of each batch: the rate of that update, scaled as the optimizer does, all the time."""
    folder = RunDirectory(run)
    begun, num_train = load_recipe(str(folder.config)), folder.summary().get("num_train")
    there = CheckpointStore(folder.checkpoints).steps()
    if not there or not isinstance(num_train, int):
        raise ConvoyError(f"{run} has no checkpoint to branch off from: train it further, or keep more of them")
    was = resolve(begun, num_train)
    steps = [step for step in there if (was.schedule.lr(step) > 0 if at is None else step == at)]
    if not steps:
        why = "has ended with a learning rate of 0" if at is None else f"has no checkpoint of update {at}"
        raise ConvoyError(f"{run} {why}: name a checkpoint with --at (there are {', '.join(map(str, there))})")
    size = begun.microbatch or -(-begun.batch // (begun.microbatches or 1))
    recipes = {}
    for batch in batches:
        rate = was.schedule.lr(steps[-1]) * rate_factor(begun.optimizer, batch / begun.batch)
        changes: dict[str, Any] = {
            "batch": batch,
            "microbatch": size,
            "microbatches": None,
            "extends": str(run.resolve()),
            "extends_at": steps[-1],
            "target": None,
            "epochs": Duration(round(steps[-1] / was.updates_per_epoch + epochs, 9), "ep"),
            "evaluate_every": Duration(epochs, "ep"),
            "log_every": Duration(epochs / (10 * _PARTS), "ep"),
            "optimizer": begun.optimizer.model_copy(update={"lr": float(f"{rate:.6g}"), "base_lr": None}),
            "schedule": ConstantConfig(name="constant"),
        }
        recipes[batch] = begun.model_copy(update=changes)
        resolve(recipes[batch], num_train)
        check_extension(recipes[batch])
    return steps[-1], recipes


def train_branches(folder: Path, recipes: dict[int, Recipe], epochs: float, jobs: Jobs) -> list[dict[str, Any]]:
    """Train all branches, and give a row of each: the mean training loss of each part of the stretch, which are the
    same samples in all; None where the rate was too high. They are compared by the last half of the parts, over which
    it is less noise than a test."""
    failures: dict[str, str | None] = {}
    all_jobs = [Job(f"batch-{batch}", recipe) for batch, recipe in recipes.items()]
    folder.mkdir(parents=True, exist_ok=True)
    jobs.run(lambda: [job for job in all_jobs if job.name not in failures], lambda j, f: failures.update({j.name: f}))
    rows: list[dict[str, Any]] = []
    for job in all_jobs:
        failure = failures[job.name]
        if failure is not None and ADVICE not in failure:
            raise ConvoyError(f"{job.name} was not trained: {failure}")
        metrics = read_metrics(folder / job.name / "metrics.jsonl")
        parts: list[list[float]] = [[] for _ in range(_PARTS)]
        for line in metrics.train:
            done = ((line.epoch or 0.0) - job.recipe.epochs.value + epochs) / epochs
            parts[min(_PARTS - 1, max(0, math.ceil(done * _PARTS - 1e-6) - 1))].append(line.loss or math.nan)
        losses = [statistics.fmean(part) for part in parts if part] if failure is None else []
        last = metrics.test[-1] if failure is None and metrics.test else None
        row: dict[str, Any] = {"batch": job.recipe.batch, "rate": job.recipe.optimizer.lr, "losses": losses}
        row |= {"loss": statistics.fmean(losses[-(_PARTS // 2) :]) if losses else None}
        rows.append(row | {"test_loss": last and last.loss, "top1": last and last.top1})
    lowest = min((row["loss"] for row in rows if row["loss"] is not None), default=None)
    if lowest is None:
        raise ConvoyError("the loss of every branch stopped being finite: name smaller batches")
    return [row | {"over_the_lowest": row["loss"] and row["loss"] / lowest - 1} for row in rows]


def largest_useful(rows: list[dict[str, Any]], tolerance: float) -> int:
    """The largest batch whose loss is within a share of the lowest."""
    useful = [row for row in rows if row["loss"] is not None and row["over_the_lowest"] <= tolerance]
    return max(int(row["batch"]) for row in useful)
