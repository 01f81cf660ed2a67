"""The next stretch of a run in several batches: up to which the loss over samples stays what it is with small ones."""

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

_PARTS = 4  # evaluations of a stretch


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
            "evaluate_every": Duration(epochs / _PARTS, "ep"),
            "optimizer": begun.optimizer.model_copy(update={"lr": float(f"{rate:.6g}"), "base_lr": None}),
            "schedule": ConstantConfig(name="constant"),
        }
        recipes[batch] = begun.model_copy(update=changes)
        resolve(recipes[batch], num_train)
        check_extension(recipes[batch])
    return steps[-1], recipes


def train_branches(folder: Path, recipes: dict[int, Recipe], jobs: Jobs) -> list[dict[str, Any]]:
    """Train all branches, and give a row of each: the test loss after each part of the stretch, none where the rate was
    too high."""
    failures: dict[str, str | None] = {}
    all_jobs = [Job(f"batch-{batch}", recipe) for batch, recipe in recipes.items()]
    folder.mkdir(parents=True, exist_ok=True)
    jobs.run(lambda: [job for job in all_jobs if job.name not in failures], lambda j, f: failures.update({j.name: f}))
    rows: list[dict[str, Any]] = []
    for job in all_jobs:
        failure = failures[job.name]
        if failure is not None and ADVICE not in failure:
            raise ConvoyError(f"{job.name} was not trained: {failure}")
        tests = read_metrics(folder / job.name / "metrics.jsonl").test if failure is None else []
        losses = [line.loss for line in tests]
        row: dict[str, Any] = {"batch": job.recipe.batch, "rate": job.recipe.optimizer.lr, "losses": losses[:-1]}
        rows.append(row | {"test_loss": losses[-1] if losses else None, "top1": tests[-1].top1 if tests else None})
    lowest = min((row["test_loss"] for row in rows if row["test_loss"] is not None), default=None)
    if lowest is None:
        raise ConvoyError("the loss of every branch stopped being finite: name smaller batches")
    return [row | {"over_the_lowest": row["test_loss"] and row["test_loss"] / lowest - 1} for row in rows]


def largest_useful(rows: list[dict[str, Any]], tolerance: float) -> int:
    """The largest batch whose loss at the end is within a share of the lowest."""
    useful = [row for row in rows if row["test_loss"] is not None and row["over_the_lowest"] <= tolerance]
    return max(int(row["batch"]) for row in useful)
