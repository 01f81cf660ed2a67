"""The course of a study: predictions first, then rounds in which all configurations take turns, then trainings."""

import math
import os
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256

from convoy.bench.ask import Ask, parts_of
from convoy.bench.emulated import Cluster, emulate
from convoy.bench.measure import forecast, measure_rank
from convoy.bench.measurement import MeasurementTask
from convoy.bench.processes import Location, RankFailed, RankSlots, Say, reason_of, run_ranks
from convoy.bench.records import (
    AUTO,
    CONVOY,
    Configuration,
    Forecast,
    Measurement,
    RankTimes,
    Store,
    TableOptions,
    Training,
)
from convoy.bench.study import Prepared, assumed, prepare, recipe_for, too_coarse
from convoy.bench.training_runs import add_evaluations, recipe_for_training, train_run
from convoy.data import open_data
from convoy.errors import ConvoyError
from convoy.report.report import write_report
from convoy.training import Recipe, RunDirectory
from convoy.training.derived import num_microbatches, resolve
from convoy.units import plural

IMAGENET = 1_281_167
# Where nobody says how many updates are timed in a round: so many seconds of the first row, within bounds.
TIMED_S, LEAST, MOST = 2.0, 3, 100


@dataclass
class Course:
    """Work on the configurations of a study."""

    recipe: Recipe
    rows: Sequence[Configuration]  # also those of earlier calls
    store: Store
    slots: RankSlots
    timeout: float = 600.0  # seconds for all ranks; in a training, seconds without a word from them
    progress: Say = lambda what, done, total: None  # hears of the work as a whole
    tell: Callable[[str], None] = lambda sentence: None  # gets sentences for the user


@dataclass
class MeasuringSchedule(Course):
    """Measures what a store does not have yet; it is saved after every measurement.

    Every second round goes through the configurations backwards, and from round to round the devices move on by one
    over the cores, so that neither a machine that becomes slower nor a core that is slower favors anyone.
    """

    rounds: int = 1  # measurements of each configuration
    predict: bool = True  # whether the planner predicts

    def __call__(self) -> None:
        """Measure; a ConvoyError where no configuration at all can be measured."""
        self._began, self._planning, self._done = time.perf_counter(), 0.0, 0
        numbers = list(dict.fromkeys(row.devices for row in self.rows if row.kind == CONVOY))
        self._total = len(numbers) + self.rounds * len(self.rows)
        if self.rounds and self.store.study.updates is None:
            self.store.study.updates = self._found_updates()
        self._save()
        for number in numbers:
            self._forecast(number)
            self._done += 1
        for round_ in range(1, self.rounds + 1):
            for row in self.rows if round_ % 2 else reversed(self.rows):
                if not row.failed and all(one.round != round_ for one in row.visits):
                    self._measure(row, round_)
                self._done += 1
        if self._total:
            self.progress("measured", self._total, self._total)
        if all(row.failed for row in self.rows):
            raise ConvoyError(str(self.rows[0].failed))

    def _found_updates(self) -> int | None:
        """The number of updates that takes the usual time in the first row that runs; None where none does.

        Rows that do not run are not measured, but for one whose plan the planner is still to find.
        """
        for row in self.rows:
            self.progress(f"trying {row.label}", self._done, self._total)
            plan, shares = (row.plan, row.shares) if row.plan != AUTO else (None, "")
            ranks = self._ranks(row, self._task(row, plan, shares, updates=2, warm_up=2), 1)
            if not isinstance(ranks, str):
                update_s = max(statistics.median(rank.seconds) for rank in ranks)
                return max(LEAST, min(MOST, round(TIMED_S / update_s)))
            if row.plan != AUTO:
                self._fail(row, ranks)
        return LEAST if any(row.plan == AUTO for row in self.rows) else None

    def _forecast(self, devices: int) -> None:
        """Predict the rows on some devices that have no prediction yet, and let the planner choose."""
        rows = [row for row in self.rows if row.kind == CONVOY and row.devices == devices and not row.failed]
        earlier = self.store.forecasts.get(devices, Forecast())
        numbers = {row.shares for row in rows if row.plan == AUTO and row.shares not in ("", "auto")}
        bound = sorted(numbers.difference(earlier.bound))
        plans = list(dict.fromkeys(row.plan for row in rows if row.plan is not None))
        if earlier.auto is not None:  # a choice stays
            plans = [
                earlier.auto if plan == AUTO else plan for plan in plans if plan != AUTO or not earlier.auto_shares
            ]
        plans = [plan for plan in plans if plan == AUTO or (self.predict and plan not in earlier.predictions)]
        if not plans and not bound:
            return
        began, what = time.perf_counter(), f"planning for {plural(devices, 'device')}"
        self.progress(what, self._done, self._total)
        keep = not self.store.study.cluster  # times on a share of a core are not those of this machine
        try:
            forecast_: Forecast = run_ranks(
                forecast,
                self.slots.of(devices),
                self._task(rows[0], None, ""),
                plans,
                bound,
                self.predict,
                keep,
                seconds=self.timeout,
                say=lambda part, done, total: self.progress(
                    f"{what}: {part}, {done} of {total}", self._done, self._total
                ),
            )[0]
        except (RankFailed, ConvoyError) as error:
            forecast_ = Forecast(notes=[f"nothing is predicted for {devices}: {reason_of(error)}"])
        for note in forecast_.notes:
            self.tell(f"{plural(devices, 'device')}: {note}")
        self.store.put_forecast(devices, forecast_)
        self._planning += time.perf_counter() - began
        self._save()

    def _measure(self, row: Configuration, round_: int) -> None:
        what = f"round {round_} of {self.rounds}: {row.label}, {plural(row.devices, 'device')}"
        self.progress(what, self._done, self._total)
        began, started = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
        ranks = self._ranks(row, self._task(row, self.store.plan_of(row), self.store.shares_of(row)), round_)
        if isinstance(ranks, str):
            self._fail(row, ranks)
        elif not math.isfinite(loss := sum(rank.loss for rank in ranks)):
            self._fail(row, f"the loss of the first update is {loss}")
        else:
            wall = round(time.perf_counter() - began, 3)
            row.visits.append(Measurement(round=round_, started=started, wall_s=wall, loss=loss, ranks=ranks))
        self._save()

    def _ranks(self, row: Configuration, task: MeasurementTask, round_: int) -> list[RankTimes] | str:
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

    def _save(self) -> None:
        self.store.spent(time.perf_counter() - self._began, self._planning)
        self.store.save()


@dataclass
class TrainingRuns(Course):
    """Trains what is not finished yet, stopped and gone on with as any run; the store is saved after every run."""

    command: str = ""  # the command line that repeats the study

    def __call__(self) -> None:
        """Train; a ConvoyError where no configuration at all can be trained."""
        rows = [row for row in self.rows if row.kind == CONVOY and not row.place]
        trainings = [self.store.add_training(row) for row in rows]
        self._began = time.perf_counter()
        updates = resolve(self.recipe, len(open_data(self.recipe.data).train)).total_updates
        for number, (row, kept) in enumerate(zip(rows, trainings, strict=True)):
            if not kept.finished:
                self._train(row, kept, number * updates, len(rows) * updates)
        self.progress("trained", len(rows) * updates, len(rows) * updates)
        if rows and all(kept.failed for kept in trainings):
            raise ConvoyError(str(trainings[0].failed))

    def _train(self, row: Configuration, kept: Training, before: int, total: int) -> None:
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
                train_run,
                self.slots.of(row.devices),
                task,
                out,
                self.command,
                not study.cluster,  # times on emulated devices are not those of this machine
                seconds=self.timeout,
                lasting=True,
                say=lambda said, done, _: self.progress(f"training {row.where}: {said}", before + done, total),
            )
            kept.finished = not any(signals)
        except (RankFailed, ConvoyError) as error:
            kept.failed = reason_of(error)
        finally:
            kept.wall_s = round(kept.wall_s + time.perf_counter() - began, 3)
            if (out / "metrics.jsonl").is_file():
                add_evaluations(kept, out, study.batch_on(row.devices))
            store.spent_on_training(time.perf_counter() - self._began)
            store.save()
        if (out / "config.yaml").is_file():
            try:
                write_report(out)
            except ConvoyError as error:
                self.tell(str(error))
        if kept.failed:
            self.tell(f"{row.where} was not trained: {kept.failed}")
        elif not kept.finished:
            stopped = next(filter(None, signals))
            self.tell(f"the training of {row.where} was stopped by {stopped}; the same command goes on")


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
            store.begin(ask.command, datetime.now(UTC).isoformat(timespec="seconds"))
            for sentence in _coarse(prepared):
                tell(sentence)
            slots = RankSlots(study.cores_per_device, places)
            predict = ask.predict and ask.rounds > 0
            shared = (store.add(rows), store, slots, ask.timeout, progress, tell)
            MeasuringSchedule(recipe, *shared, ask.rounds, predict)()
            if ask.train_epochs is not None:
                trained = recipe_for_training(recipe, ask.train_epochs, ask.says("evaluate_every"))
                TrainingRuns(trained, *shared, ask.command)()


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
