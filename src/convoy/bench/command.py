"""The course of a study: predictions first, then rounds in which all configurations take turns, then trainings."""

import math
import os
import re
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from convoy.bench.ask import Ask, parts_of
from convoy.bench.emulated import Cluster, emulate
from convoy.bench.measure import forecast, measure_rank
from convoy.bench.measurement import MeasurementTask, join
from convoy.bench.processes import Location, RankFailed, RankSlots, Say, reason_of, run_ranks
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
from convoy.bench.study import Prepared, assumed, prepare, recipe_for, too_coarse
from convoy.comm.position import current
from convoy.data import open_data
from convoy.doctor.updates import RunDoctor
from convoy.errors import ConvoyError
from convoy.progress import Reporter
from convoy.report.run_directory import column, read_metrics
from convoy.training import Recipe, RunDirectory, Trainer
from convoy.training.config import Duration
from convoy.training.derived import num_microbatches, resolve
from convoy.units import plural

IMAGENET = 1_281_167
# Where nobody says how many updates are timed in a round: so many seconds of the first row, within bounds.
TIMED_S, LEAST, MOST = 2.0, 3, 100


@dataclass
class Course:
    """Work on the configurations of a study, of which a store keeps what there is not yet after every part."""

    recipe: Recipe
    rows: Sequence[Configuration]  # also those of earlier calls
    store: Store
    slots: RankSlots
    timeout: float = 600.0  # seconds for all ranks; in a training, seconds without a word from them
    progress: Say = lambda what, done, total: None  # hears of the work as a whole
    tell: Callable[[str], None] = lambda sentence: None  # gets sentences for the user

    def measure(self, rounds: int = 1, predict: bool = True) -> None:
        """Predict and measure; a ConvoyError where no configuration at all can be measured.

        Every second round goes through the configurations backwards, and from round to round the devices move on by
        one over the cores, so that neither a machine that becomes slower nor a core that is slower favors anyone.
        """
        began, planning = time.perf_counter(), 0.0
        numbers = list(dict.fromkeys(row.devices for row in self.rows if row.kind == CONVOY))
        done, total = 0, len(numbers) + rounds * len(self.rows)

        def save() -> None:
            session = self.store.sessions[-1]
            session.wall_s, session.planning_s = round(time.perf_counter() - began, 3), round(planning, 3)
            self.store.save()

        if rounds and self.store.study.updates is None:
            self.store.study.updates = self._usual_updates(total)
        save()
        for number in numbers:
            start = time.perf_counter()
            self._forecast(number, predict, done, total)
            planning += time.perf_counter() - start
            done += 1
            save()
        for round_ in range(1, rounds + 1):
            for row in self.rows if round_ % 2 else reversed(self.rows):
                if not row.failed and all(one.round != round_ for one in row.visits):
                    self.progress(
                        f"round {round_} of {rounds}: {row.label}, {plural(row.devices, 'device')}", done, total
                    )
                    self._measure(row, round_)
                    save()
                done += 1
        if total:
            self.progress("measured", total, total)
        if all(row.failed for row in self.rows):
            raise ConvoyError(str(self.rows[0].failed))

    def _usual_updates(self, total: int) -> int | None:
        """The number of updates that takes the usual time in the first row that runs; None where none does.

        Rows that do not run are not measured, but for one whose plan the planner is still to find.
        """
        for row in self.rows:
            self.progress(f"trying {row.label}", 0, total)
            plan, shares = (row.plan, row.shares) if row.plan != AUTO else (None, "")
            ranks = self._ranks(row, self._task(row, plan, shares, updates=2, warm_up=2), 1)
            if not isinstance(ranks, str):
                update_s = max(statistics.median(rank.seconds) for rank in ranks)
                return max(LEAST, min(MOST, round(TIMED_S / update_s)))
            if row.plan != AUTO:
                self._fail(row, ranks)
        return LEAST if any(row.plan == AUTO for row in self.rows) else None

    def _forecast(self, devices: int, predict: bool, done: int, total: int) -> None:
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
        self.progress(what, done, total)
        keep = not self.store.study.cluster  # times on a share of a core are not those of this machine
        try:
            (new, *_) = run_ranks(
                forecast,
                self.slots.of(devices),
                self._task(rows[0], None, ""),
                plans,
                bound,
                predict,
                keep,
                seconds=self.timeout,
                say=lambda part, number, of: self.progress(f"{what}: {part}, {number} of {of}", done, total),
            )
        except (RankFailed, ConvoyError) as error:
            new = Forecast(notes=[f"nothing is predicted for {devices}: {reason_of(error)}"])
        for note in new.notes:
            self.tell(f"{plural(devices, 'device')}: {note}")
        self.store.forecasts[devices] = earlier | new

    def _measure(self, row: Configuration, round_: int) -> None:
        began, started = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
        ranks = self._ranks(row, self._task(row, self.store.plan_of(row), self.store.shares_of(row)), round_)
        if isinstance(ranks, str):
            self._fail(row, ranks)
        elif not math.isfinite(loss := sum(rank.loss for rank in ranks)):
            self._fail(row, f"the loss of the first update is {loss}")
        else:
            wall = round(time.perf_counter() - began, 3)
            row.visits.append(Measurement(round=round_, started=started, wall_s=wall, loss=loss, ranks=ranks))

    def _ranks(self, row: Configuration, task: MeasurementTask, round_: int) -> list[RankTimes] | str:
        """The times of all ranks, or why there are none."""
        slots = self.slots.of(row.devices, round_, row.place)
        quiet = row.kind != CONVOY  # some greet at every start
        try:
            return run_ranks(measure_rank, slots, task, seconds=self.timeout, quiet=quiet)
        except (RankFailed, ConvoyError) as error:
            return reason_of(error)

    def _fail(self, row: Configuration, reason: str) -> None:
        row.failed = reason
        self.tell(f"{row.where}: {reason}")

    def _task(
        self, row: Configuration, plan: str | None, shares: str, updates: int = 0, warm_up: int | None = None
    ) -> MeasurementTask:
        study = self.store.study
        return MeasurementTask(
            kind=row.kind,
            recipe=recipe_for(self.recipe, study, row, plan, shares),
            made=study.images,
            device_type=f"cuda:{row.place}" if row.place and study.device_type == "cuda" else study.device_type,
            updates=updates or study.updates or LEAST,
            warm_up=study.warm_up if warm_up is None else warm_up,
        )

    def train(self, command: str = "") -> None:
        """Train what is not finished yet, stopped and gone on with as any run; a ConvoyError where no configuration at
        all can be trained. `command` repeats the study."""
        rows = [row for row in self.rows if row.kind == CONVOY and not row.place]
        trainings: list[Training] = []
        for row in rows:  # one that has failed is tried again
            row.training = row.training or Training()
            row.training.failed = None
            trainings.append(row.training)
        began, session = time.perf_counter(), self.store.sessions[-1]
        measuring = session.wall_s
        updates = resolve(self.recipe, len(open_data(self.recipe.data).train)).total_updates
        total = len(rows) * updates
        for number, (row, training) in enumerate(zip(rows, trainings, strict=True)):
            if training.finished:
                continue
            try:
                self._train(row, training, command, number * updates, total)
            finally:
                session.training_s = round(time.perf_counter() - began, 3)
                session.wall_s = round(measuring + session.training_s, 3)
                self.store.save()
        self.progress("trained", total, total)
        if rows and all(training.failed for training in trainings):
            raise ConvoyError(str(trainings[0].failed))

    def _train(self, row: Configuration, training: Training, command: str, before: int, total: int) -> None:
        store, study = self.store, self.store.study
        name = re.sub(r"[^A-Za-z0-9=.,#-]+", "-", row.key)
        if len(name) > 80 or "\n" in row.key:
            name = f"{name[:30]}-{sha256(row.key.encode()).hexdigest()[:10]}"
        out = store.path.parent / "training" / name
        if out.is_dir() and not (out / "config.yaml").is_file():
            shutil.rmtree(out)  # ended before it had begun
        recipe = recipe_for(self.recipe, study, row, store.plan_of(row), store.shares_of(row))
        task = MeasurementTask(CONVOY, recipe, None, study.device_type, updates=0, warm_up=0)
        began = time.perf_counter()
        signals: list[str | None] = []
        try:
            signals = run_ranks(
                train_rank,
                self.slots.of(row.devices),
                task,
                out,
                command,
                not study.cluster,  # times on emulated devices are not those of this machine
                seconds=self.timeout,
                lasting=True,
                say=lambda text, done, _: self.progress(f"training {row.where}: {text}", before + done, total),
            )
            training.finished = not any(signals)
        except (RankFailed, ConvoyError) as error:
            training.failed = reason_of(error)
        finally:
            training.wall_s = round(training.wall_s + time.perf_counter() - began, 3)
            if (out / "metrics.jsonl").is_file():
                add_evaluations(training, out, study.batch_on(row.devices))
        if (out / "config.yaml").is_file():
            from convoy.report.report import write_report  # with matplotlib, for which no rank is to wait at its start

            try:
                write_report(out)
            except ConvoyError as error:
                self.tell(str(error))
        if training.failed:
            self.tell(f"{row.where} was not trained: {training.failed}")
        elif not training.finished:
            stopped = next(filter(None, signals))
            self.tell(f"the training of {row.where} was stopped by {stopped}; the same command goes on")


_BEAT_S = 1.0


class Latest(Reporter):
    """The newest figures of a training, for the study's own line."""

    figures = ("beginning", 0, 0)

    def prepare(self, what: str, done: int, total: int) -> None:
        self.figures = what, 0, 0

    def begin(self, done: int, total: int) -> None:
        self.figures = self.figures[0], done, total

    def advance(self, done: int, text: str | None = None) -> None:
        self.figures = text or self.figures[0], done, self.figures[2]


@contextmanager
def heard(latest: Latest, say: Say) -> Iterator[None]:
    """Tell the newest figures every second in which the training has moved, also where it reports nothing new."""
    ended = threading.Event()

    def beat() -> None:
        before = None
        while not ended.wait(_BEAT_S):
            if before != (before := (latest.figures, current.moved)):
                say(*latest.figures)

    thread = threading.Thread(target=beat, daemon=True, name="convoy-beat")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def train_rank(task: MeasurementTask, out: Path, command: str, keep: bool, say: Say) -> str | None:
    """A rank's part of a training, in the folder `out`; the name of the signal that stopped it, None at its end. All
    ranks call it. `command` repeats the study; `keep` uses times that were measured before, and stores new ones."""
    ranks, device = join(task)
    options: dict[str, Any] = {
        "command": command,
        "reporter": Latest(),
        "handed_on": True,
        "keep": keep,
        "subscribe": RunDoctor,
    }
    with heard(options["reporter"], say):
        return Trainer(task.recipe, out, resume=True, device=device, ranks=ranks, **options).run().signal


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
    study, recipe, rows = prepared.study, prepared.recipe, prepared.rows
    Store.open(ask.folder, study, prepared.machine)
    if study.images is not None and (sentence := assumed(recipe, study.images, ask.image_size)):
        tell(sentence)
    size = ask.dataset_size or (IMAGENET if study.images is not None else len(open_data(recipe.data, progress).train))
    with _places(prepared.cluster) as places:
        try:
            ask.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConvoyError(f"--out {ask.folder} cannot be made ({error.strerror}): choose another place") from error
        with RunDirectory(ask.folder).lock(tell=tell):
            store = Store.open(ask.folder, study, prepared.machine)  # as it is when nobody else writes there
            store.study.updates = store.study.updates or study.updates
            store.table = TableOptions(epochs=ask.epochs, dataset_size=size, rounds=ask.rounds)
            if ask.train_epochs is not None:
                store.begin_training(ask.train_epochs)
            started = datetime.now(UTC).isoformat(timespec="seconds")
            store.sessions.append(Session(command=ask.command, started=started))
            for sentence in _coarse(prepared):
                tell(sentence)
            slots = RankSlots(study.cores_per_device, places)
            course = Course(recipe, store.add(rows), store, slots, ask.timeout, progress, tell)
            course.measure(ask.rounds, ask.predict and ask.rounds > 0)
            if ask.train_epochs is not None:
                course.recipe = recipe_for_training(recipe, ask.train_epochs, ask.says("evaluate_every"))
                course.train(ask.command)


def _coarse(prepared: Prepared) -> list[str]:
    """Sentences on batches that cannot be divided by the speeds of an emulated cluster's devices."""
    study, microbatches = prepared.study, num_microbatches(prepared.recipe)
    by_speed = [row for row in prepared.rows if row.shares and study.speeds]
    wanted = [row.devices for row in by_speed if parts_of(row.plan or "serial", row.devices) == row.devices]
    sentences = [too_coarse(study.batch_on(number), microbatches, study.speeds[:number]) for number in wanted]
    return list(dict.fromkeys(filter(None, sentences)))


@contextmanager
def _places(cluster: Cluster | None) -> Iterator[Sequence[Location]]:
    if cluster is None:
        yield []
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hosts of a cluster have no names, which torch would tell
    with emulate(cluster) as places:
        yield places
