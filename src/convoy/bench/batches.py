"""A study of the batch: how many updates a target takes by batch and optimizer, with the learning rate tuned at each.

Tuning begins at the middle batch and goes outward: a batch begins with the rate that its neighbor found best, scaled as
the optimizer does. All is computed anew from the run directories whenever a training has ended, so that a study goes on
wherever it was stopped, with more batches and seeds, too.
"""

import math
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import Field

from convoy import units
from convoy.bench.jobs import Job, Outcome
from convoy.bench.records import Record, TrainingStudy
from convoy.recipe.optim import learning_rate, rate_factor
from convoy.recipe.recipe import Recipe, load_recipe
from convoy.recipe.schema import Duration
from convoy.run.directory import RunDirectory
from convoy.training.derived import resolve
from convoy.training.finite import ADVICE

LONGEST = 2.0  # times the updates of the best rate so far, after which a training of another one ends
_OFTEN, _FIRST = 20, 4  # evaluations until the target is expected; and in an epoch, where nothing is known yet

# Smaller is better: (0, updates) of a training that reached the target, (1, test error) of one that did not, and
# (2, place) of one that failed, so that rates that are too high lead to lower ones.
Score = tuple[int, float]
FARTHEST = 14  # half octaves from the first guess: a factor of 128 either way
LEAST, USUAL = 4, 6  # rates of a search, at least and usually: the first three, one or three octaves more, the middle


def next_rates(scores: Mapping[int, Score]) -> list[int]:
    """The rates to be tried next, in half octaves from the first guess; none where the best is found: by factors of two
    until it is inside, then the middle between it and its better neighbor."""
    if missing := [place for place in (0, 2, -2) if place not in scores]:
        return missing
    octaves = {place: score for place, score in scores.items() if place % 2 == 0}
    best = min(octaves, key=lambda place: (octaves[place], place))
    if outside := [place for place in (best - 2, best + 2) if place not in octaves and abs(place) <= FARTHEST]:
        return outside
    neighbors = [place for place in (best - 2, best + 2) if place in octaves]
    middle = (best + min(neighbors, key=lambda place: (octaves[place], place))) // 2
    return [] if middle in scores else [middle]


PERFECT, DIMINISHING, NONE = REGIMES = "perfect scaling", "diminishing returns", "no gain"
# Slopes of log(updates) over log(batch): -1 where twice the batch needs half the updates, 0 where it needs as many.
_STEEP, _FLAT = -0.75, -0.25


def regimes(batches: Sequence[int], updates: Sequence[float]) -> list[str]:
    """The regime in which each batch after the first lies (Shallue et al., 2019, section 4.1), by the slope from the
    one before it; the first has that of the second. No regime comes back once it is left: a steeper slope behind a flat
    one is noise."""
    latest, names = 0, list[str]()
    for (small, more), (large, fewer) in pairwise(zip(batches, updates, strict=True)):
        slope = math.log(fewer / more) / math.log(large / small)
        latest = max(latest, 0 if slope <= _STEEP else 1 if slope <= _FLAT else 2)
        names.append(REGIMES[latest])
    return [*names[:1], *names]


class BatchRow(Record):
    """An optimizer at a batch with its best rate: the trainings of all seeds."""

    optimizer: str
    batch: int
    lr: float
    run: str  # the run directory of the first seed
    updates: float  # the median over the seeds; infinite where it did not reach the target
    ends: list[int]  # of the seeds that reached it
    update_s: float  # on one device
    top1: float  # the best
    failure: str | None
    noise_scale: float | None  # at the end of the first seed
    regime: str = ""


class BatchStudy(TrainingStudy):
    """The file of a study."""

    NAME, VERB = "batches.json", "convoy bench --batches"
    batches: list[int] = Field([])  # in rising order
    seeds: int = 1
    rows: list[BatchRow] = Field([])  # of which all is trained
    speedups: dict[int, dict[int, float]] = Field({})  # that the planner predicts: by batch, by devices

    def compared(self, **facts: Any) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        stored, wanted = dict(self.facts["recipes"]), facts["facts"]["recipes"]
        first = next(iter(stored.values()))
        for name in wanted.keys() - stored.keys():  # one that is added differs from another in its optimizer alone
            stored[name] = first | {"optimizer": wanted[name]["optimizer"]}
        yield "is of a study", self.facts | {"recipes": stored}, facts["facts"]

    def reached(self, optimizer: str | None = None) -> list[BatchRow]:
        """The rows with the target, of one optimizer or of the one that needs fewest updates at each batch."""
        rows = [row for row in self.rows if row.updates < math.inf and optimizer in (None, row.optimizer)]
        best = {row.batch: row for row in sorted(rows, key=lambda row: -row.updates)}
        return [best[batch] for batch in sorted(best)]

    def times(self) -> Iterator[tuple[BatchRow, int, float]]:
        """The seconds to the target of each batch on one device, and on several as the planner predicts."""
        for row in self.reached():
            for devices, speedup in {1: 1.0, **self.speedups.get(row.batch, {})}.items():
                yield row, devices, row.updates * row.update_s / speedup

    def critical(self) -> float | None:
        """The batch at which the target takes about twice its fewest updates and twice its fewest samples, which the
        noise scale predicts (McCandlish et al., 2018, equation 2.11); None where the batches show one regime only."""
        rows = self.reached()
        if len({row.regime for row in rows}) < 2:
            return None
        return min(row.updates * row.batch for row in rows) / min(row.updates for row in rows)


def agreement(sizes: Mapping[str, float | None]) -> str:
    """A sentence on the largest useful batch by several measures, those first that are to be believed."""
    pairs = {name: size for name, size in sizes.items() if size}
    if len(pairs) < 2:
        return ""
    words = ", ".join(f"about {units.significant(size, 2)} by {name}" for name, size in pairs.items())
    apart = max(pairs.values()) / min(pairs.values())
    if apart <= 2:
        return f"The largest useful batch is {words}: they agree within a factor of two."
    return (
        f"The largest useful batch is {words}, {units.significant(apart, 2)} times apart: believe {next(iter(pairs))}."
    )


@dataclass
class Search:
    """The rows as far as outcomes tell, and which trainings come next."""

    study: BatchStudy
    recipes: dict[str, Recipe]  # by optimizer
    outcomes: Mapping[Path, Outcome]
    jobs: list[Job] = field(default_factory=list)  # all that can be done by now, those first that others wait for

    def __post_init__(self) -> None:
        """The middle batch of all optimizers comes first, then its neighbors."""
        batches, rows = self.study.batches, dict[tuple[str, int], BatchRow]()
        middle = len(batches) // 2
        for number in sorted(range(len(batches)), key=lambda number: abs(number - middle)):
            batch, before = batches[number], batches[number + (number < middle) - (number > middle)]
            for name in self.recipes:
                if number == middle or (name, before) in rows:
                    row = self._row(name, batch, rows.get((name, before)))
                    rows |= {(name, batch): row} if row is not None else {}
        self.rows = [row for row in self.study.rows if row.optimizer not in self.recipes]  # of earlier calls
        self.rows += [rows[name, batch] for name in self.recipes for batch in batches if (name, batch) in rows]
        for name in self.recipes:
            reached = [row for row in self.rows if row.optimizer == name and row.updates < math.inf]
            of_rows = regimes([row.batch for row in reached], [row.updates for row in reached])
            for row, regime in zip(reached, of_rows, strict=False):
                row.regime = regime

    def _row(self, optimizer: str, batch: int, neighbor: BatchRow | None) -> BatchRow | None:
        """The row of a batch that begins with what its neighbor found; None where trainings are to come."""
        recipe, num_train = self.recipes[optimizer].model_copy(update={"batch": batch}), self.study.facts["num_train"]
        tune, expected, guess = self.study.facts["tune"], math.inf, learning_rate(recipe.optimizer, batch)
        if neighbor is not None:
            expected = neighbor.updates * max(1.0, neighbor.batch / batch)
            guess = neighbor.lr * rate_factor(recipe.optimizer, batch / neighbor.batch) if tune else guess
        every = max(1, round(expected / _OFTEN if expected < math.inf else num_train / batch / _FIRST))
        longest, scores = resolve(recipe, num_train).total_updates, dict[int, Score]()

        def trained(place: int, seed: int = 0) -> Outcome | None:
            fewest = min((number for kind, number in scores.values() if kind == 0), default=expected)
            limit = longest if fewest == math.inf else max(2 * every, math.ceil(LONGEST * fewest))
            outcome = self._trained(recipe, rate_at(guess, place), seed, limit, every)
            return None if outcome is not None and is_broken(outcome) else outcome  # says nothing of the rate

        while places := next_rates(scores) if tune else [0][len(scores) :]:
            outcomes = {place: trained(place) for place in places}
            if None in outcomes.values():
                return None
            scores |= {place: _score(outcome, place) for place, outcome in outcomes.items() if outcome is not None}
        best = min(scores, key=lambda place: (scores[place], place))
        for place in scores.keys() - {best}:  # convoy branch may go on with the best
            shutil.rmtree(self._out(recipe, rate_at(guess, place), 0) / "checkpoints", ignore_errors=True)
        trials = [outcome for seed in range(self.study.seeds) if (outcome := trained(best, seed)) is not None]
        if len(trials) < self.study.seeds:
            return None
        updates = [number if kind == 0 else math.inf for kind, number in (_score(trial, best) for trial in trials)]
        return BatchRow(
            optimizer=optimizer,
            batch=batch,
            lr=rate_at(guess, best),
            run=self._out(recipe, rate_at(guess, best), 0).name,
            updates=statistics.median_low(updates),
            ends=sorted(int(number) for number in updates if number < math.inf),
            update_s=(trials[0].summary.get("train_s") or 0.0) / max(1, trials[0].summary.get("steps") or 0),
            top1=max(trial.summary.get("best_top1") or 0.0 for trial in trials),
            failure=trials[0].failure,
            noise_scale=trials[0].summary.get("noise_scale"),
        )

    def _out(self, recipe: Recipe, rate: float, seed: int) -> Path:
        return self.study.folder / f"{recipe.optimizer.name}-{recipe.batch}-lr{rate:g}-seed{seed}"

    def _trained(self, recipe: Recipe, rate: float, seed: int, limit: int, every: int) -> Outcome | None:
        """What came of a training; None where it is still to be done. One that was begun goes on as it was begun."""
        out, warmup = self._out(recipe, rate, seed), recipe.schedule.warmup
        if out in self.outcomes:
            return self.outcomes[out]
        warmup = Duration(min(warmup.updates(self.study.facts["num_train"] // recipe.batch, limit), limit // 2), "ba")
        changes: dict[str, Any] = {
            "seed": recipe.seed + seed,
            "optimizer": recipe.optimizer.model_copy(update={"lr": rate, "base_lr": None}),
            "schedule": recipe.schedule.model_copy(update={"warmup": warmup}),
            "epochs": Duration(limit, "ba"),
            "evaluate_every": Duration(every, "ba"),
            "target": self.study.facts["target"],
        }
        run = RunDirectory(out)
        recipe = load_recipe(str(run.config)) if run.is_run() else recipe.model_copy(update=changes)
        self.jobs.append(Job(out, recipe))
        return None


def rate_at(guess: float, place: int) -> float:
    """A rate, to four digits."""
    return float(f"{guess * 2 ** (place / 2):.4g}")


def is_broken(outcome: Outcome) -> bool:
    """Whether a training failed by something else than its rate."""
    return outcome.failure is not None and ADVICE not in outcome.failure


def _score(outcome: Outcome, place: int) -> Score:
    summary = outcome.summary
    if outcome.failure is not None:
        return 2, place
    return (0, summary["steps"]) if summary.get("reached") else (1, 1 - (summary.get("best_top1") or 0.0))
