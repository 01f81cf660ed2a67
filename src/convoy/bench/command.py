"""The course of a study: predictions first, then rounds in which all configurations take turns, then trainings."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from convoy.bench.ask import Ask
from convoy.bench.configuration import AUTO, CONVOY, Configuration, parts_of
from convoy.bench.emulated import Cluster, emulate
from convoy.bench.forecast import Forecast, forecast
from convoy.bench.measure import measure_rank
from convoy.bench.measurement import MeasurementTask, RankTimes
from convoy.bench.processes import Location, RankFailed, RankSlots, Say, run_ranks
from convoy.bench.store import Store
from convoy.bench.study import IMAGENET, Prepared, Study, assumed, prepare, too_coarse
from convoy.bench.training_runs import TrainingRuns, recipe_for_training
from convoy.data import open_data
from convoy.errors import ConvoyError
from convoy.training import RunDirectory
from convoy.training.derived import num_microbatches
from convoy.units import plural

TIMED_S, LEAST, MOST = 2.0, 3, 100
"""Where nobody says how many updates are timed in a round: so many seconds of the first row, within bounds."""


@dataclass
class MeasuringSchedule:
    """Measures what a store does not have yet; it is saved after every measurement.

    Every second round goes through the configurations backwards, and from round to round the devices move on by one
    over the cores, so that neither a machine that becomes slower nor a core that is slower favours anyone.

    Attributes:
        slots: where ranks run.
        rounds: measurements of each configuration.
        timeout: seconds after which a measurement is given up.
        predict: whether the planner predicts.
        progress: is told of the work as a whole: what, done, of how many.
        tell: is told what was found, in sentences.
    """

    study: Study
    configurations: Sequence[Configuration]
    store: Store
    slots: RankSlots
    rounds: int
    timeout: float = 600.0
    predict: bool = True
    progress: Say = lambda what, done, total: None
    tell: Callable[[str], None] = lambda sentence: None
    _planning: float = field(default=0.0, init=False)

    def __call__(self) -> None:
        """Measure.

        Raises:
            ConvoyError: no configuration at all can be measured, through a mistake of the user.
        """
        self._began = time.perf_counter()
        self.store.add(list(self.configurations))
        self._done = 0
        numbers = list(dict.fromkeys(row.devices for row in self.configurations if row.kind == CONVOY))
        self._total = len(numbers) + self.rounds * len(self.configurations)
        if self.rounds:
            self._choose_updates()
        for number in numbers:
            self._forecast(number)
            self._done += 1
        for round_ in range(1, self.rounds + 1):
            for row in self.configurations if round_ % 2 else reversed(self.configurations):
                self._measure(row, round_)
                self._done += 1
        if self._total:
            self.progress("measured", self._total, self._total)
        failed = [self.store.row(row)["failed"] for row in self.configurations]
        if all(failed):
            raise ConvoyError(str(failed[0]))

    def _choose_updates(self) -> None:
        """Settle how many updates are timed, the same for all."""
        kept = self.store.document["study"]
        if kept["updates"] is None:
            kept["updates"] = self.study.updates or self._found_updates()
        self.study = self.study.with_updates(kept["updates"])
        self._save()

    def _found_updates(self) -> int | None:
        """As many as take the usual time in the first row that runs; None where none does.

        What does not run is not measured, but for a row whose plan the planner is still to find.
        """
        for row in self.configurations:
            self.progress(f"trying {row.label}", self._done, self._total)
            plan, shares = (row.plan, row.shares) if row.plan != AUTO else (None, "")
            ranks = self._measured(row, self._task(row, plan, shares, updates=2, warm_up=2), 1)
            if isinstance(ranks, list):
                each = max(statistics.median(lap.seconds for lap in rank.laps) for rank in ranks)
                return max(LEAST, min(MOST, round(TIMED_S / each)))
            if row.plan != AUTO:
                self._fail(row, ranks)
        return LEAST if any(row.plan == AUTO for row in self.configurations) else None

    def _forecast(self, devices: int) -> None:
        """Predict the rows on some devices that have no prediction yet, and let the planner choose."""
        rows = [row for row in self.configurations if row.kind == CONVOY and row.devices == devices]
        rows = [row for row in rows if not self.store.row(row)["failed"]]
        plans = list(dict.fromkeys(row.plan for row in rows if row.plan is not None))
        known = self.store.forecast(devices) or {"auto": None, "predictions": {}}
        auto, by_speed = known["auto"], known.get("auto_shares")
        numbers = {row.shares for row in rows if row.plan == AUTO and row.shares not in ("", "auto")}
        bound = sorted(numbers.difference(known.get("bound", ())))
        if auto is not None:  # what has been chosen stays
            plans = [auto if plan == AUTO else plan for plan in plans if plan != AUTO or not by_speed]
        plans = [plan for plan in plans if plan == AUTO or (self.predict and plan not in known["predictions"])]
        if not plans and not bound:
            return
        began = time.perf_counter()
        what = f"planning for {plural(devices, 'device')}"
        self.progress(what, self._done, self._total)
        task = self._task(rows[0], None, "")
        keep = not self.study.cluster  # times on a share of a core are not those of this machine
        try:
            ranks: list[Forecast] = run_ranks(
                forecast,
                self.slots.of(devices),
                task,
                plans,
                bound,
                self.predict,
                keep,
                seconds=self.timeout,
                say=lambda part, done, total: self.progress(f"{what}: {part}", self._done, self._total),
            )
            found = ranks[0]
        except RankFailed as error:
            found = Forecast(notes=(f"nothing is predicted for {devices}: {error.reason}",))
        except ConvoyError as error:
            found = Forecast(notes=(f"nothing is predicted for {devices}: {error}",))
        for note in found.notes:
            self.tell(f"{plural(devices, 'device')}: {note}")
        self.store.put_forecast(devices, found)
        self._planning += time.perf_counter() - began
        self._save()

    def _measure(self, row: Configuration, round_: int) -> None:
        kept = self.store.row(row)
        if kept["failed"] or any(one["round"] == round_ for one in kept["visits"]):
            return
        what = f"round {round_} of {self.rounds}: {row.label}, {plural(row.devices, 'device')}"
        self.progress(what, self._done, self._total)
        began, started = time.perf_counter(), datetime.now(UTC).isoformat(timespec="seconds")
        task = self._task(row, self.store.plan_of(row), self.store.shares_of(row))
        ranks = self._measured(row, task, round_)
        if isinstance(ranks, list):
            self.store.put_measurement(row, round_, ranks, started, time.perf_counter() - began)
        else:
            self._fail(row, ranks)
        self._save()

    def _measured(self, row: Configuration, task: MeasurementTask, round_: int) -> list[RankTimes] | str:
        """What the ranks of a row measured, or why they did not."""
        slots = self.slots.of(row.devices, round_, row.place)
        quiet = row.kind != CONVOY  # some greet at every start
        try:
            return run_ranks(measure_rank, slots, task, seconds=self.timeout, quiet=quiet)
        except ConvoyError as error:
            return str(error)
        except RankFailed as error:
            return error.reason

    def _fail(self, row: Configuration, reason: str) -> None:
        self.store.row(row)["failed"] = reason
        self.tell(f"{row.label} on {plural(row.devices, 'device')}: {reason}")

    def _task(
        self, row: Configuration, plan: str | None, shares: str, updates: int | None = None, warm_up: int | None = None
    ) -> MeasurementTask:
        study = self.study
        return MeasurementTask(
            kind=row.kind,
            recipe=study.recipe_for(row, plan, shares),
            made=study.made,
            device_type=f"{study.device_type}:{row.place}" if row.place and not study.on_cpu else study.device_type,
            updates=updates or study.updates or LEAST,
            warm_up=study.warm_up if warm_up is None else warm_up,
        )

    def _save(self) -> None:
        self.store.spent(time.perf_counter() - self._began, self._planning)
        self.store.save()


def measure(ask: Ask, progress: Say, tell: Callable[[str], None]) -> None:
    """Measure what is not known yet, and train where that is asked for.

    Args:
        ask: what is asked for, checked.
        progress: is told of the work as a whole: what, done, of how many.
        tell: is told sentences that stay.

    Raises:
        ConvoyError: something in it cannot be, or another process measures there.
    """
    prepared = prepare(ask)
    study, recipe = prepared.study, prepared.study.recipe
    Store.open(ask.folder, study, prepared.machine)
    if study.made is not None and (sentence := assumed(recipe, study.made, ask.image_size)):
        tell(sentence)
    size = ask.dataset_size or (IMAGENET if study.made is not None else len(open_data(recipe.data, progress).train))
    with _places(prepared.cluster) as places:
        _make_folder(ask.folder)
        with RunDirectory(ask.folder).lock(tell=tell):
            store = Store.open(ask.folder, study, prepared.machine)  # as it is when nobody else writes there
            store.document["table"] = {"epochs": ask.epochs, "dataset_size": size, "rounds": ask.rounds}
            if ask.train_epochs is not None:
                store.begin_training(ask.train_epochs)
            store.begin(ask.command, datetime.now(UTC).isoformat(timespec="seconds"))
            for sentence in _coarse(study, prepared.rows):
                tell(sentence)
            _run(ask, prepared, store, RankSlots(study.cores_per_device, places), progress, tell)


def _run(
    ask: Ask, prepared: Prepared, store: Store, slots: RankSlots, progress: Say, tell: Callable[[str], None]
) -> None:
    """The rounds, then the trainings."""
    study, rows = prepared.study, prepared.rows
    predict = ask.predict and ask.rounds > 0
    MeasuringSchedule(study, rows, store, slots, ask.rounds, ask.timeout, predict, progress, tell)()
    if ask.train_epochs is not None:
        said = any(setting.startswith("evaluate_every") for setting in ask.settings)
        trained = replace(study, recipe=recipe_for_training(study.recipe, ask.train_epochs, said))
        TrainingRuns(trained, rows, store, ask.folder, slots, ask.timeout, ask.command, progress, tell)()


def _coarse(study: Study, rows: list[Configuration]) -> list[str]:
    """Sentences on batches that cannot be divided by the speeds of an emulated cluster's devices."""
    microbatches = num_microbatches(study.recipe)
    wanted = dict.fromkeys(
        row.devices for row in rows if row.shares and parts_of(row.plan or "serial", row.devices) == row.devices
    )
    found = [too_coarse(study.batch(number), microbatches, study.speeds[:number]) for number in wanted if study.speeds]
    return list(dict.fromkeys(filter(None, found)))


@contextmanager
def _places(cluster: Cluster | None) -> Iterator[Sequence[Location]]:
    """The devices of an emulated cluster; none without one."""
    if cluster is None:
        yield []
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hosts of a cluster have no names, which torch would tell
    with emulate(cluster) as places:
        yield places


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConvoyError(f"--out {folder} cannot be made ({error.strerror}): choose another place") from error
