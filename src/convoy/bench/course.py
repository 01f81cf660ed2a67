"""The course of a study: predictions first, then rounds in which all configurations take turns, then trainings."""

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from convoy.bench.ask import Ask
from convoy.bench.emulated import Cluster, emulate
from convoy.bench.jobs import STOPPED, Job, Jobs
from convoy.bench.measure import MeasurementTask, forecast, measure_rank
from convoy.bench.processes import Place, Places, RankFailed, Say, reason_of, run_ranks
from convoy.bench.records import (
    AUTO,
    CONVOY,
    Configuration,
    Evaluation,
    Forecast,
    Measurement,
    RankTimes,
    Session,
    Store,
    TableOptions,
    Training,
)
from convoy.bench.study import opened, prepare, recipe_for
from convoy.errors import ConvoyError
from convoy.recipe.recipe import Recipe
from convoy.recipe.schema import Duration
from convoy.report.run import column, read_metrics
from convoy.training.derived import resolve
from convoy.units import plural

IMAGENET = 1_281_167
# Where nobody says how many updates are timed in a round: those of so many seconds by the first prediction, within
# bounds, or so many where nothing is predicted.
TIMED_S, LEAST, MOST, UNPREDICTED = 2.0, 3, 100, 10


@dataclass
class Course:
    """Work on the configurations of a study, of which a store keeps what there is not yet after every part."""

    recipe: Recipe
    rows: Sequence[Configuration]  # also those of earlier calls
    store: Store
    places: Places
    timeout: float = 600.0  # seconds for all ranks; in a training, those in which nothing moves
    progress: Say = lambda what, done, total: None  # hears of the work as a whole
    tell: Callable[[str], None] = lambda sentence: None  # gets sentences for the user
    done: int = 0  # parts of the work, of `total`
    total: int = 0

    def _say(self, what: str) -> None:
        self.progress(what, self.done, self.total)

    @contextmanager
    def _spending(self, *times: str) -> Iterator[None]:
        """Adds the seconds spent within to these times of the command, and saves the study."""
        session, began = self.store.sessions[-1], time.perf_counter()
        try:
            yield
        finally:
            spent_s = time.perf_counter() - began
            for name in ("wall_s", *times):
                setattr(session, name, round(getattr(session, name) + spent_s, 3))
            self.store.save()

    def measure(self, rounds: int = 1, predict: bool = True) -> None:
        """Predict and measure; a ConvoyError where no configuration at all can be measured.

        Every second round goes through the configurations backwards, and from round to round the devices move on by
        one over the cores, so that neither a machine that becomes slower nor a core that is slower favors anyone.
        """
        numbers = list(dict.fromkeys(row.devices for row in self.rows if row.kind == CONVOY))
        self.total = len(numbers) + rounds * len(self.rows)
        for number in numbers:
            with self._spending("planning_s"):
                self._forecast(number, predict)
            self.done += 1
        study = self.store.study
        if rounds and study.updates is None:
            predicted = filter(None, map(self.store.prediction_of, self.rows))
            update_s = next((prediction.seconds for prediction in predicted), TIMED_S / UNPREDICTED)
            study.updates = max(LEAST, min(MOST, round(TIMED_S / update_s)))
        for round_ in range(1, rounds + 1):
            for row in self.rows if round_ % 2 else reversed(self.rows):
                if not row.failed and all(visit.round != round_ for visit in row.visits):
                    self._say(f"round {round_} of {rounds}: {row.label}, {plural(row.devices, 'device')}")
                    with self._spending():
                        self._measure(row, round_)
                self.done += 1
        if self.total:
            self._say("measured")
        if all(row.failed for row in self.rows):
            raise ConvoyError(str(self.rows[0].failed))

    def _forecast(self, devices: int, predict: bool) -> None:
        """Predict the rows on some devices that have no prediction yet, and let the planner choose."""
        rows = [row for row in self.rows if row.kind == CONVOY and row.devices == devices and not row.failed]
        earlier = self.store.forecasts.get(devices, Forecast())
        numbers = {row.shares for row in rows if row.plan == AUTO and row.shares not in ("", "auto")}
        bound = sorted(numbers.difference(earlier.bound))
        plans = list(dict.fromkeys(row.plan for row in rows if row.plan is not None))
        if earlier.auto is not None:  # a choice stays
            chosen = [] if earlier.auto_shares else [earlier.auto]
            plans = [name for plan in plans for name in (chosen if plan == AUTO else [plan])]
        plans = [plan for plan in plans if plan == AUTO or (predict and plan not in earlier.predictions)]
        if not plans and not bound:
            return
        what = f"planning for {plural(devices, 'device')}"
        self._say(what)
        try:
            (new, *_) = run_ranks(
                forecast,
                self.places.of(devices),
                replace(self._task(rows[0]), recipe=recipe_for(self.recipe, self.store.study, rows[0], None)),
                plans,
                bound,
                predict,
                not self.store.study.cluster,  # times on a share of a core are not those of this machine
                seconds=self.timeout,
                say=lambda part, number, of: self._say(f"{what}: {part}, {number} of {of}"),
            )
        except (RankFailed, ConvoyError) as error:
            new = Forecast(notes=[f"nothing is predicted for {devices}: {reason_of(error)}"])
        for note in new.notes:
            self.tell(f"{plural(devices, 'device')}: {note}")
        self.store.forecasts[devices] = earlier | new

    def _measure(self, row: Configuration, round_: int) -> None:
        task, places = self._task(row), self.places.of(row.devices, round_, row.place)
        quiet = row.kind != CONVOY  # some greet at every start
        try:
            ranks: list[RankTimes] = run_ranks(measure_rank, places, task, seconds=self.timeout, quiet=quiet)
            loss = sum(rank.loss for rank in ranks)
            if not math.isfinite(loss):
                raise RankFailed(f"the loss of the first update is {loss}")
        except (RankFailed, ConvoyError) as error:
            row.failed = reason_of(error)
            self.tell(f"{row.where}: {row.failed}")
            return
        row.visits.append(Measurement(round=round_, loss=loss, ranks=ranks))

    def _task(self, row: Configuration) -> MeasurementTask:
        """What a row runs, as far as its plan is known."""
        study, store = self.store.study, self.store
        plan, shares = store.plan_of(row), store.shares_of(row)
        recipe = recipe_for(self.recipe, study, row, plan, shares)
        return MeasurementTask(row.kind, recipe, study.images, study.device_type, study.updates or LEAST, study.warm_up)

    def train(self, command: str = "") -> None:
        """Train what is not finished yet, stopped and gone on with as any run; a ConvoyError where no configuration at
        all can be trained. `command` repeats the study."""
        rows = [row for row in self.rows if row.kind == CONVOY and not row.place]
        updates = resolve(self.recipe, len(opened(self.recipe).train)).total_updates
        self.done, self.total = 0, len(rows) * updates
        for row in rows:  # one that has failed is tried again
            row.training = row.training or Training()
            row.training.failed = None
        for row in rows:
            if row.training is not None and not row.training.finished:
                with self._spending("training_s"):
                    self._train(row, row.training, command)
            self.done += updates
        self._say("trained")
        failures = [row.training.failed for row in rows if row.training is not None]
        if rows and all(failures):
            raise ConvoyError(str(failures[0]))

    def _train(self, row: Configuration, training: Training, command: str) -> None:
        name = re.sub(r"[^A-Za-z0-9=.,#-]+", "-", row.key)
        if len(name) > 80 or "\n" in row.key:
            name = f"{name[:30]}-{sha256(row.key.encode()).hexdigest()[:10]}"
        out = self.store.folder / "training" / name
        job, before = Job(out, self._task(row).recipe), self.done

        def say(_: Job, text: str, done: int, of: int) -> None:
            self.progress(f"training {row.where}: {text}", before + done, self.total)

        device_type, keeps_times = self.store.study.device_type, not self.store.study.cluster
        jobs = Jobs(self.places, row.devices, device_type, command, keeps_times, self.timeout, say)
        try:
            failure = jobs.train(lambda _: [job])[out].failure
        finally:
            if (out / "metrics.jsonl").is_file():
                add_evaluations(training, out, self.store.study.batch_on(row.devices))
        stopped = (failure or "").startswith(STOPPED)
        training.finished, training.failed = failure is None, None if stopped else failure
        if (out / "config.yaml").is_file():
            from convoy.report.report import write_report  # with matplotlib, for which no rank is to wait at its start

            try:
                write_report(out)
            except ConvoyError as error:
                self.tell(str(error))
        if training.failed:
            self.tell(f"{row.where} was not trained: {training.failed}")
        elif stopped:
            self.tell(f"the training of {row.where} {failure}; the same command goes on")


_FEW, _OFTEN = 10, Duration(5, "%")  # where a run would be evaluated less often than so many times, it is this often


def recipe_for_training(recipe: Recipe, epochs: float, is_asked: bool) -> Recipe:
    """The recipe of all trainings; `is_asked` says whether the user has said how often to evaluate."""
    changes: dict[str, Duration] = {"epochs": Duration(epochs, "ep")}
    every = recipe.evaluate_every
    if not is_asked and every.unit == "ep" and epochs / every.value < _FEW:
        changes["evaluate_every"] = _OFTEN
    return recipe.model_copy(update=changes)


def add_evaluations(training: Training, run: Path, batch: int) -> None:
    """Take over what a run in a folder has written so far; an update has `batch` images."""
    metrics = read_metrics(run / "metrics.jsonl")
    steps, rates = column(metrics.train, "step"), column(metrics.train, "images_per_s")
    ends = np.cumsum(np.diff(steps, prepend=0) * batch / rates)
    seconds = np.interp(column(metrics.test, "step"), [0, *steps], [0, *ends])
    training.run = run.name
    training.images = max((line.images or 0 for line in metrics.test), default=0)
    training.evaluations = [
        Evaluation(
            step=line.step,
            epoch=line.epoch,
            error=None if line.top1 is None else round(1 - line.top1, 9),
            loss=line.loss,
            train_s=round(float(second), 3),
        )
        for line, second in zip(metrics.test, seconds, strict=True)
    ]
    weights = run / "weights.safetensors"
    training.sha256 = sha256(weights.read_bytes()).hexdigest() if weights.is_file() else ""


def measure(ask: Ask, progress: Say, tell: Callable[[str], None]) -> None:
    """Measure all rows that are not measured yet, and train them with --train-epochs. `tell` gets sentences that
    stay."""
    prepared = prepare(ask)
    study, recipe = prepared.study, prepared.recipe
    facts: dict[str, Any] = {"study": study, "machine": prepared.machine}
    Store.open(ask.folder, **facts)
    data = opened(recipe, progress) if study.images is None else None
    if data is not None and ask.train_epochs is not None and data.task != "classification":
        raise ConvoyError(f"--train-epochs compares test errors, and {data.name} is for {data.task}: leave it out")
    size = ask.dataset_size or (IMAGENET if data is None else len(data.train))
    del data
    with _emulated(prepared.cluster) as emulated, Store.alone(ask.folder, tell, **facts) as store:
        store.study.updates = store.study.updates or study.updates
        store.table = TableOptions(epochs=ask.epochs, dataset_size=size, rounds=ask.rounds)
        if ask.train_epochs is not None:
            store.begin_training(ask.train_epochs)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        store.sessions.append(Session(command=ask.command, started=started))
        for sentence in prepared.notes:
            tell(sentence)
        places = Places(study.cores_per_device, emulated)
        course = Course(recipe, store.add(prepared.rows), store, places, ask.timeout, progress, tell)
        course.measure(ask.rounds, ask.predict and ask.rounds > 0)
        if ask.train_epochs is not None:
            course.recipe = recipe_for_training(recipe, ask.train_epochs, ask.says("evaluate_every"))
            course.train(ask.command)


@contextmanager
def _emulated(cluster: Cluster | None) -> Iterator[Sequence[Place]]:
    if cluster is None:
        yield []
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hosts of a cluster have no names, which torch would tell
    with emulate(cluster) as places:
        yield places
