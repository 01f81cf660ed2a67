"""A study of the batch: how many updates a target takes by batch and optimizer, with the learning rate tuned at each.

The trainings are jobs, one a device. Tuning begins at the middle batch and goes outward: a batch begins with the rate
that its neighbor found best, scaled as the optimizer does.
"""

import math
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from convoy.bench.jobs import Job
from convoy.bench.records import Record, difference
from convoy.bench.search import Score, next_rates, rate_at
from convoy.errors import ConvoyError
from convoy.files import write_text
from convoy.training.derived import resolve
from convoy.training.gradients import ADVICE
from convoy.training.optim import learning_rate, rate_factor
from convoy.training.recipe import Recipe
from convoy.training.run_directory import RunDirectory
from convoy.training.schema import Duration

NAME = "batches.json"
LONGEST = 2.0  # times the updates of the best rate so far, after which a training of another one ends
_OFTEN, _FIRST = 20, 4  # evaluations until the target is expected; and in an epoch, where nothing is known yet


class Trial(Record):
    """A training, and what came of it."""

    optimizer: str
    batch: int
    place: int  # of its rate in the search
    lr: float
    seed: int
    limit: int  # updates after which it ends in any case
    every: int  # updates from one evaluation to the next
    done: bool = False
    reached: bool = False
    updates: int = 0  # at its end
    train_s: float = 0.0  # seconds of training, without evaluations and checkpoints
    top1: float = 0.0  # the best
    failed: str | None = None

    @property
    def name(self) -> str:
        return f"{self.optimizer}-{self.batch}-lr{self.lr:g}-seed{self.seed}"

    @property
    def score(self) -> Score:
        if self.failed is not None:
            return 2, self.lr
        return (0, self.updates) if self.reached else (1, 1 - self.top1)


class StepTime(Record):
    """Seconds of an update of a batch on some devices, measured or predicted."""

    batch: int
    devices: int
    seconds: float
    measured: bool


class BatchFacts(Record):
    """What all trainings share; they tell whether two studies can be in one file."""

    model: str
    recipes: dict[str, dict[str, Any]]  # by optimizer
    target: float
    tune: bool
    device_type: str
    cores_per_device: int
    num_train: int


class BatchStudy(Record):
    """The file of a study."""

    format: Literal["convoy-batches-1"] = "convoy-batches-1"
    facts: BatchFacts
    machine: dict[str, Any] = Field({})
    commands: list[str] = Field([])
    batches: list[int] = Field([])  # in rising order
    seeds: int = 1
    trials: list[Trial] = Field([])
    step_times: list[StepTime] = Field([])

    @staticmethod
    def read(path: Path) -> "BatchStudy":
        """The study in a file, or in the file that a folder has."""
        path = path / NAME if path.is_dir() else path
        try:
            return BatchStudy.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise ConvoyError(f"{path} is no study of convoy bench --batches, or damaged: name another") from error

    @staticmethod
    def open(folder: Path, facts: BatchFacts) -> "BatchStudy":
        """The study that is in a folder, or a new one; a ConvoyError where there is another, or a run."""
        if RunDirectory(folder).is_run():
            raise ConvoyError(f"--out {folder} holds a training run, which a study would overwrite: give another --out")
        if not (folder / NAME).exists():
            return BatchStudy(facts=facts)
        study = BatchStudy.read(folder)
        if unlike := difference(study.facts.model_dump(mode="json"), facts.model_dump(mode="json")):
            raise ConvoyError(f"{folder / NAME} is of a study with {unlike}: give another --out, or remove it")
        for trial in study.trials:  # one that failed is tried again, unless its rate was too high
            trial.done = trial.done and (trial.failed is None or ADVICE in trial.failed)
        return study

    def save(self, folder: Path) -> None:
        write_text(folder / NAME, self.model_dump_json() + "\n")

    def of(self, optimizer: str, batch: int) -> list[Trial]:
        """All trainings of a pair."""
        return [trial for trial in self.trials if (trial.optimizer, trial.batch) == (optimizer, batch)]

    def best(self, optimizer: str, batch: int) -> Trial | None:
        """The training of the first seed with the best rate so far."""
        ended = [trial for trial in self.of(optimizer, batch) if trial.done and trial.seed == 0]
        return min(ended, key=lambda trial: (trial.score, trial.place), default=None)

    def next_places(self, optimizer: str, batch: int) -> list[int]:
        """The places of rates that are still to be trained at a batch; none where the search has ended."""
        ended = [trial for trial in self.of(optimizer, batch) if trial.done and trial.seed == 0]
        scores = {trial.place: trial.score for trial in ended}
        return next_rates(scores) if self.facts.tune else [0] if 0 not in scores else []

    def rows(self, optimizer: str) -> "list[BatchRow]":
        """A row for each batch of which all seeds were trained with the best rate."""
        rows = []
        for batch in self.batches:
            best = self.best(optimizer, batch)
            if best is not None and not self.next_places(optimizer, batch):
                trials = [trial for trial in self.of(optimizer, batch) if trial.done and trial.place == best.place]
                rows += [BatchRow(best, trials)] if len(trials) == self.seeds else []
        return rows

    def fewest(self) -> dict[int, float]:
        """The updates to the target by batch, with the optimizer that needs fewest."""
        rows = [row for name in self.facts.recipes for row in self.rows(name) if row.reached]
        return {row.best.batch: row.updates for row in sorted(rows, key=lambda row: -row.updates)}


@dataclass(frozen=True)
class BatchRow:
    """An optimizer at a batch with its best rate: the trainings of all seeds."""

    best: Trial
    trials: list[Trial]

    @property
    def reached(self) -> bool:
        """Whether most seeds reached the target."""
        return 2 * sum(trial.reached for trial in self.trials) > len(self.trials)

    @property
    def updates(self) -> float:
        """The median over the seeds, of which one without the target counts as longer than all others."""
        return statistics.median_low([trial.updates if trial.reached else math.inf for trial in self.trials])

    @property
    def band(self) -> tuple[float, float]:
        """The fewest and the most updates of any seed that reached the target."""
        numbers = [trial.updates for trial in self.trials if trial.reached]
        return min(numbers), max(numbers)


@dataclass
class BatchCourse:
    """Which trainings a study needs next, and what came of those that have ended."""

    study: BatchStudy
    recipes: dict[str, Recipe]  # by optimizer
    folder: Path

    def wanted(self) -> list[Job]:
        """The trainings that can be done now, those first that others wait for."""
        study, middle = self.study, len(self.study.batches) // 2
        names = {trial.name: trial for trial in study.trials}
        jobs = []
        for number in sorted(range(len(study.batches)), key=lambda number: abs(number - middle)):
            batch, before = study.batches[number], study.batches[number + (number < middle) - (number > middle)]
            for optimizer in self.recipes:
                neighbor = study.best(optimizer, before) if batch != before else None
                if batch != before and (neighbor is None or study.next_places(optimizer, before)):
                    continue  # it begins with what its neighbor finds
                trials = [names.setdefault(trial.name, trial) for trial in self._trials(optimizer, batch, neighbor)]
                jobs += [Job(trial.name, self._recipe(trial)) for trial in trials if not trial.done]
        study.trials = list(names.values())
        return jobs

    def _trials(self, optimizer: str, batch: int, neighbor: Trial | None) -> Iterator[Trial]:
        """The trainings that a pair needs now: of the rates to be tried, or of the other seeds with the best one."""
        study, recipe, num_train = self.study, self.recipes[optimizer], self.study.facts.num_train
        trials, best = study.of(optimizer, batch), study.best(optimizer, batch)
        expected = None
        if neighbor is not None and neighbor.reached:
            expected = neighbor.updates * max(1.0, neighbor.batch / batch)
        if trials:
            guess, every = trials[0].lr, trials[0].every  # which has place 0
        else:
            every = max(1, round(expected / _OFTEN if expected else num_train / batch / _FIRST))
            guess = learning_rate(recipe.optimizer, batch)
            if neighbor is not None and study.facts.tune:
                guess = neighbor.lr * rate_factor(recipe.optimizer, batch / neighbor.batch)
        fewest = best.updates if best is not None and best.reached else expected
        limit = resolve(recipe.model_copy(update={"batch": batch}), num_train).total_updates
        limit = limit if fewest is None else max(2 * every, math.ceil(LONGEST * fewest))
        pair: dict[str, Any] = {"optimizer": optimizer, "batch": batch, "limit": limit, "every": every}
        places = study.next_places(optimizer, batch)
        for place in places:
            yield Trial(**pair, place=place, lr=rate_at(rate_at(guess, 0), place), seed=0)
        if best is not None and not places:
            yield from (Trial(**pair, place=best.place, lr=best.lr, seed=seed) for seed in range(1, study.seeds))

    def _recipe(self, trial: Trial) -> Recipe:
        recipe = self.recipes[trial.optimizer]
        warmup = recipe.schedule.warmup.updates(self.study.facts.num_train // trial.batch, trial.limit)
        changes: dict[str, Any] = {
            "batch": trial.batch,
            "seed": recipe.seed + trial.seed,
            "optimizer": recipe.optimizer.model_copy(update={"lr": trial.lr, "base_lr": None}),
            "schedule": recipe.schedule.model_copy(update={"warmup": Duration(min(warmup, trial.limit // 2), "ba")}),
            "epochs": Duration(trial.limit, "ba"),
            "evaluate_every": Duration(trial.every, "ba"),
            "target": self.study.facts.target,
        }
        return recipe.model_copy(update=changes)

    def ended(self, job: Job, failure: str | None) -> None:
        """Keep what came of a training, without its checkpoints."""
        trial = next(trial for trial in self.study.trials if trial.name == job.name)
        run = RunDirectory(self.folder / job.name)
        summary = run.summary()
        trial.failed, trial.done = failure, True
        trial.reached = failure is None and bool(summary.get("reached"))
        for key, name in (("updates", "steps"), ("train_s", "train_s"), ("top1", "best_top1")):
            setattr(trial, key, summary.get(name) or 0)
        if failure is None:
            shutil.rmtree(run.checkpoints, ignore_errors=True)
        self.study.save(self.folder)

    def check_reached(self) -> None:
        """Refuse (ConvoyError) a study in which no training reached the target."""
        trials = [trial for trial in self.study.trials if trial.done]
        if trials and not any(trial.reached for trial in trials):
            best = max(trials, key=lambda trial: trial.top1)
            why = f"the best was {best.top1:.2%} ({best.name})" if best.top1 else str(best.failed)
            more = "lower it, or train longer (--set epochs=…)"
            raise ConvoyError(f"no training reached --target {self.study.facts.target:g}: {why}; {more}")
