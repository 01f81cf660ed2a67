"""The next stretch of a run in several batches: up to which the loss over samples stays what it is with small ones."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from convoy.bench.jobs import Job, Jobs
from convoy.bench.processes import Places
from convoy.checkpoint.store import CheckpointStore
from convoy.errors import ConvoyError
from convoy.report.run_directory import read_metrics
from convoy.resources import own_cores
from convoy.training import Recipe, RunDirectory, choose_device
from convoy.training.derived import resolve
from convoy.training.optim import ConstantConfig, rate_factor
from convoy.training.recipe import load_recipe
from convoy.training.resume import check_extension
from convoy.training.schema import Duration

_PARTS = 4  # evaluations of a stretch


@dataclass(frozen=True)
class Branch:
    """A stretch in one batch, and the test loss after each part of it."""

    batch: int
    lr: float
    losses: list[float]
    top1: float


def branches_of(run: Path, batches: list[int], epochs: float, at: int | None) -> tuple[int, dict[int, Recipe]]:
    """The update of a run after which the branches begin, its newest checkpoint with a rate above 0 unless somebody
    says another, and the recipe of each batch: the rate of that update, scaled as the optimizer does, all the time."""
    folder = RunDirectory(run)
    begun, num_train = load_recipe(str(folder.config)), folder.summary().get("num_train")
    steps = CheckpointStore(folder.checkpoints).steps()
    if not steps or not isinstance(num_train, int):
        raise ConvoyError(f"{run} has no checkpoint to branch off from: train it further, or keep more of them")
    was = resolve(begun, num_train)
    steps = [step for step in steps if was.schedule.lr(step) > 0] if at is None else [s for s in steps if s == at]
    if not steps:
        why = "has ended with a learning rate of 0" if at is None else f"has no checkpoint of update {at}"
        there = ", ".join(map(str, CheckpointStore(folder.checkpoints).steps()))
        raise ConvoyError(f"{run} {why}: name a checkpoint with --at (there are {there})")
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


def train_branches(
    folder: Path, recipes: dict[int, Recipe], device: str | None, command: str, progress: Callable[[str], None]
) -> list[Branch]:
    """Train all branches, one a device, and read what came of them; a ConvoyError where one fails."""
    kind = choose_device(device).type
    number = torch.cuda.device_count() if kind == "cuda" else len(own_cores())
    ended: set[str] = set()

    def keep(job: Job, failure: str | None) -> None:
        ended.add(job.name)
        if failure is not None:
            raise ConvoyError(f"{job.name} was not trained: {failure}")

    all_jobs = [Job(f"batch-{batch}", recipe) for batch, recipe in recipes.items()]
    folder.mkdir(parents=True, exist_ok=True)
    jobs = Jobs(folder, kind, Places(0 if kind == "cuda" else 1), number, command, progress=progress)
    jobs.run(lambda: [job for job in all_jobs if job.name not in ended], keep)
    return [_read(folder / job.name, job.recipe) for job in all_jobs]


def _read(run: Path, recipe: Recipe) -> Branch:
    metrics = read_metrics(run / "metrics.jsonl")
    tests = [line for line in metrics.test if line.loss is not None]
    if not tests:
        raise ConvoyError(f"{run} has no finite test loss: its rate is too high")
    losses = [line.loss for line in tests if line.loss is not None]
    return Branch(recipe.batch, recipe.optimizer.lr or 0.0, losses, tests[-1].top1 or 0.0)


def largest_useful(branches: list[Branch], tolerance: float) -> int:
    """The largest batch whose loss at the end is within a share of the lowest."""
    lowest = min(branch.losses[-1] for branch in branches)
    return max(branch.batch for branch in branches if branch.losses[-1] <= (1 + tolerance) * lowest)
