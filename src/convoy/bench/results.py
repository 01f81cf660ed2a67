"""From the file of a study to the rows of its tables, how far a median of a few rounds can be trusted, and the tables,
which are the same on a terminal and on a page.

What a row is called here it is called in JSON and CSV too.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convoy import units
from convoy.bench.records import (
    AUTO,
    COMMUNICATION,
    COMPUTE,
    CONVOY,
    INPUT,
    OPTIMIZER,
    PEERS,
    Configuration,
    Measurement,
    Store,
    Training,
    short,
)
from convoy.files import csv_of
from convoy.terminal import printable
from convoy.units import seconds as time_of
from convoy.units import size, table

# Student's t at 97.5 % for 1, 2, … degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
# Standard error of a median over that of a mean, where values are normal and not too few.
_EFFICIENCY = math.sqrt(math.pi / 2)
DAY_S = 86_400


def repeatability(values: Sequence[float]) -> float | None:
    """The largest difference of the medians of two series like this one, in 95 of 100 cases (ISO 5725-6, 4.1.4).

    t · √2 · √(π/2) · s / √n, for the standard deviation s of n values; None of fewer than two.
    """
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    t = _T[freedom - 1] if freedom <= len(_T) else 1.96 + 2.4 / freedom
    return t * math.sqrt(2) * _EFFICIENCY * statistics.stdev(values) / math.sqrt(len(values))


class Named:
    """A configuration by its names."""

    RECORD: tuple[str, ...] = ()  # what programs are told of it

    def __init__(self, row: Configuration) -> None:
        self.configuration, self.name, self.devices = row.label, short(row.label), row.devices
        self.where = row.where

    @property
    def record(self) -> dict[str, Any]:
        """Seconds, bytes, and parts of one."""
        return {name: getattr(self, name) for name in self.RECORD}


class StudyRow(Named):
    """A configuration that was measured.

    `step_s` of an update is the median over the rounds of each round's median; by `spread_s` two such medians differ at
    most (None of one round). `speedup` is in images per second over the reference. `ideal` is the number of devices by
    that of the reference; of unequal ones, the sum of their speeds by the first one's, as they were measured one by one
    or else as the emulated cluster's file says. What was predicted is None where nothing was.
    """

    RECORD = (
        *("configuration", "kind", "devices", "plan", "batch", "step_s", "spread_s", "images_per_s", "speedup"),
        *("speedup_spread", "efficiency", "days", "compute_s", "exposed_communication_s", "data_wait_s", "optimizer_s"),
        *("memory_bytes", "predicted_s", "prediction_error", "predicted_memory_bytes", "rounds", "overhead_s"),
    )

    def __init__(self, store: Store, row: Configuration, reference: Configuration, alone: Sequence[float]) -> None:
        super().__init__(row)
        self.key, self.kind, self.series, self.place = row.key, row.kind, row.series, row.place
        self.rounds = len(row.visits)
        self.plan, self.batch = store.plan_of(row), store.study.batch_on(row.devices)
        times = [_seconds(measurement) for measurement in row.visits]
        self.step_s, self.spread_s = statistics.median(times), repeatability(times)
        self.images_per_s = self.batch / self.step_s
        base, rates = _rates(store, reference), _rates(store, row)
        ratios = [rates[number] / base[number] for number in rates if number in base]
        self.speedup = statistics.median(rates.values()) / statistics.median(base.values())
        # None of the reference itself, and of one round
        self.speedup_spread = repeatability(ratios) if row.key != reference.key else None
        self.ideal = _together(store, row.devices, alone) / _together(store, reference.devices, alone)
        self.efficiency = self.speedup / self.ideal if reference.devices == 1 else None
        epochs, images = store.table.epochs, store.table.dataset_size
        self.days = epochs * images / self.batch * self.step_s / DAY_S if epochs is not None else None
        self.parts = _parts(row, self.step_s)  # seconds, on the rank that waits least for others
        self.compute_s, self.exposed_communication_s = self.parts[COMPUTE], self.parts[COMMUNICATION]
        self.data_wait_s, self.optimizer_s = self.parts[INPUT], self.parts[OPTIMIZER]
        ranks = [rank for measurement in row.visits for rank in measurement.ranks]
        self.memory_bytes = max(rank.memory for rank in ranks)
        self.overhead_s = statistics.median(rank.overhead for rank in ranks)  # that timing adds
        prediction = store.prediction_of(row)
        self.predicted_s = prediction.seconds if prediction else None
        self.predicted_memory_bytes = prediction.memory if prediction else None
        self.prediction_error = prediction.seconds / self.step_s - 1 if prediction else None  # a part of the measured

    @property
    def found_plan(self) -> str:
        """The plan that the planner took; empty where it was not asked."""
        return self.plan if self.plan and self.configuration.startswith(AUTO) else ""

    @property
    def plan_label(self) -> str:
        """The name with the plan that the planner took, if that is one line."""
        return self.name if "\n" in self.found_plan or not self.found_plan else f"{self.name}: {short(self.found_plan)}"


class Results:
    """All rows of a study, and what holds of it as a whole."""

    def __init__(self, store: Store) -> None:
        measured_rows = [row for row in store.configurations if row.visits]
        reference = _reference(measured_rows)
        self.alone = _alone(store, measured_rows)  # images per second of each device by itself
        self.rows = [StudyRow(store, row, reference, self.alone) for row in measured_rows if reference is not None]
        self.reference = next((row for row in self.rows if reference is not None and row.key == reference.key), None)
        self.failed = [(row.where, row.failed) for row in store.configurations if row.failed]
        rows_left = [row.where for row in store.configurations if not row.visits and not row.failed]
        self.waiting = rows_left if store.table.rounds else []
        losses = [visit.loss for row in measured_rows if row.kind == CONVOY for visit in row.visits]
        largest = max(map(abs, losses), default=0.0)
        is_compared = len(losses) > 1 and largest and not store.study.weak
        # of the first update, relative
        self.loss_difference = (max(losses) - min(losses)) / largest if is_compared else None
        # seconds of all calls without trainings, of their predictions, and of the updates that count
        self.wall = sum(session.wall_s - session.training_s for session in store.sessions)
        self.planning = sum(session.planning_s for session in store.sessions)
        visits = [visit for row in measured_rows for visit in row.visits]
        self.timed = sum(max(sum(rank.seconds) + sum(rank.without) for rank in visit.ranks) for visit in visits)


def _reference(rows: Sequence[Configuration]) -> Configuration | None:
    """The fastest on one device, whatever it is, as a slow start would flatter all that comes after it; where nothing
    was measured on one, the first of those on the fewest."""
    usual = [row for row in rows if not row.place]
    ones = [row for row in usual if row.devices == 1]
    if ones:
        return min(ones, key=lambda row: statistics.median(map(_seconds, row.visits)))
    return min(usual or rows, key=lambda row: row.devices, default=None)


def _seconds(measurement: Measurement) -> float:
    return max(statistics.median(rank.seconds) for rank in measurement.ranks)


def _rates(store: Store, row: Configuration) -> dict[int, float]:
    """Images per second by round."""
    return {visit.round: store.study.batch_on(row.devices) / _seconds(visit) for visit in row.visits}


def _together(store: Store, devices: int, alone: Sequence[float]) -> float:
    speeds = alone if len(alone) >= devices > 1 else store.study.speeds or [1.0] * devices
    return sum(speeds[:devices]) / speeds[0]


def _alone(store: Store, rows: Sequence[Configuration]) -> list[float]:
    """Images per second of each device by itself, as far as they were measured without a gap; none of one alone."""
    ones = [row for row in rows if row.kind == CONVOY and row.devices == 1]
    rates = {row.place: statistics.median(_rates(store, row).values()) for row in reversed(ones)}
    in_order = [rates[place] for place in range(len(rates)) if place in rates]
    return in_order if len(in_order) > 1 else []


def _parts(row: Configuration, seconds: float) -> dict[str, float]:
    """Medians over the rounds; computing is what the others leave of the time of an update."""
    names = (COMMUNICATION, INPUT, OPTIMIZER)
    rounds = []
    for measurement in row.visits:
        medians = [{part: statistics.median(getattr(rank, part)) for part in names} for rank in measurement.ranks]
        busiest = min(medians, key=lambda rank: rank[COMMUNICATION])
        if row.kind in PEERS:
            alone = max(statistics.median(rank.without) for rank in measurement.ranks)
            busiest[COMMUNICATION] = max(0.0, _seconds(measurement) - alone)
        rounds.append(busiest)
    parts = {part: statistics.median(medians[part] for medians in rounds) for part in names}
    scale = min(1.0, seconds / max(sum(parts.values()), 1e-12))  # medians need not add up
    parts = {part: scale * value for part, value in parts.items()}
    return {COMPUTE: max(0.0, seconds - sum(parts.values())), **parts}


class ErrorCurve(Named):
    """A configuration's training, as far as it has come, with a value for each evaluation. The largest distances from
    the reference are over all evaluations that both have, with the updates before them; None of itself."""

    RECORD = (
        *("configuration", "devices", "finished", "updates", "test_error", "test_loss", "train_s", "distance_error"),
        *("distance_error_at", "distance_loss", "distance_loss_at", "evaluations", "weights_sha256"),
    )

    distance_error: float | None = None
    distance_error_at: int | None = None
    distance_loss: float | None = None
    distance_loss_at: int | None = None

    def __init__(self, row: Configuration, training: Training) -> None:
        super().__init__(row)
        self.finished, self.weights_sha256 = training.finished, training.sha256
        self.tests = [
            (test.step, test.train_s, test.error, test.loss)
            for test in training.evaluations
            if test.error is not None and test.loss is not None
        ]
        # Weight updates, seconds without evaluations and checkpoints, test error from 0 to 1, test loss
        self.steps, self.seconds, self.errors, self.losses = np.array(self.tests, np.float64).reshape(-1, 4).T
        last = self.tests[-1] if self.tests else (0, 0.0, 0.0, 0.0)
        self.updates, self.train_s, self.test_error, self.test_loss = last
        self.evaluations, self.compared = len(self.tests), 0

    def compare(self, other: "ErrorCurve") -> None:
        steps, places, other_places = np.intersect1d(self.steps, other.steps, return_indices=True)
        self.compared = len(steps)
        for name, values, other_values in (("error", self.errors, other.errors), ("loss", self.losses, other.losses)):
            if self.compared:
                distances = np.abs(values[places] - other_values[other_places])
                setattr(self, f"distance_{name}", float(distances.max()))
                setattr(self, f"distance_{name}_at", int(steps[distances.argmax()]))

    @property
    def records(self) -> list[dict[str, Any]]:
        """Of each evaluation, as in the pictures."""
        names = ("configuration", "devices", "updates", "train_s", "test_error", "test_loss")
        return [dict(zip(names, (self.configuration, self.devices, *test), strict=True)) for test in self.tests]


class Convergence:
    """All curves of a study."""

    def __init__(self, store: Store, epochs: float) -> None:
        rows = [(row, row.training) for row in store.configurations if row.kind == CONVOY and row.training is not None]
        curves = [ErrorCurve(row, training) for row, training in rows]
        self.epochs = epochs
        self.curves = [curve for curve in curves if curve.tests]
        # the serial run, or that on the fewest devices
        self.reference = min(self.curves, key=lambda curve: curve.devices, default=None)
        for curve in self.curves:
            if self.reference is not None and curve is not self.reference:
                curve.compare(self.reference)
        self.compared = [curve for curve in self.curves if curve.compared]
        self.images = max((training.images for _, training in rows), default=0)
        self.failed = [(row.where, training.failed) for row, training in rows if training.failed]
        self.waiting = [row.where for row, training in rows if not training.failed and not training.finished]

    def same_weights(self, curve: ErrorCurve) -> bool:
        reference = self.reference
        return reference is not None and bool(curve.weights_sha256) and curve.weights_sha256 == reference.weights_sha256


def convergence(store: Store) -> Convergence | None:
    """The curves of a study; None where nothing was to be trained."""
    return Convergence(store, store.training["epochs"]) if store.training is not None else None


_TEXTS = ("configuration", "trained", "final weights")  # columns that are not of numbers


@dataclass(frozen=True)
class Table:
    """The same rows for people, in few characters, and with plain numbers: seconds, bytes, and parts of one."""

    rows: list[dict[str, str]]
    records: list[dict[str, Any]]
    note: str  # what it is of

    @property
    def columns(self) -> dict[str, bool]:
        """Their names, and whether they are of numbers, which are aligned to the right."""
        return {name: name not in _TEXTS for row in self.rows[:1] for name in row}

    @property
    def headings(self) -> list[str]:
        """For a page, whose macro `table` takes those of numbers with a `#`."""
        return ["#" * is_number + name.capitalize() for name, is_number in self.columns.items()]

    def lines(self) -> list[str]:
        right = [name for name, is_number in self.columns.items() if is_number]
        return table(list(self.columns), [list(row.values()) for row in self.rows], right) if self.rows else []

    def csv(self) -> str:
        return csv_of(self.records)


def of_updates(results: Results, store: Store) -> Table:
    """A row for each configuration that was measured."""
    note = f"{printable(store.study.model)}, batch {store.study.batch} {'a device' if store.study.weak else 'in all'}"
    return Table([_cells(row) for row in results.rows], [row.record for row in results.rows], note)


def _cells(row: StudyRow) -> dict[str, str]:
    predicted = "" if row.predicted_s is None else f"{time_of(row.predicted_s)} ({signed(row.prediction_error or 0.0)})"
    return {
        "configuration": row.plan_label,
        "devices": str(row.devices),
        "step": plus_minus(row.step_s, row.spread_s),
        "images/s": units.significant(row.images_per_s),
        "speed-up": f"{row.speedup:.2f}" + ("" if row.speedup_spread is None else f" ± {row.speedup_spread:.2f}"),
        "efficiency": units.percent(row.efficiency, 0),
        **({} if row.days is None else {"days": units.significant(row.days)}),
        "exposed": time_of(row.parts[COMMUNICATION]),
        "data wait": time_of(row.parts[INPUT]),
        "memory": size(row.memory_bytes),
        "predicted": predicted or units.UNKNOWN,
    }


def plus_minus(seconds: float, spread: float | None) -> str:
    """A time with its spread in the same unit: `12.3 ± 0.4 ms`."""
    number, _, unit = time_of(seconds).partition(" ")
    if spread is None:
        return f"{number} {unit}"
    places = len(number.partition(".")[2])
    return f"{number} ± {spread * {'ms': 1e3, 'µs': 1e6}.get(unit, 1.0):.{places}f} {unit}"


def signed(share: float) -> str:
    """A relative error: `+3.1 %`."""
    return f"{'+' if share >= 0 else units.MINUS}{100 * abs(share):.1f}{units.SPACE}%"


def points(share: float) -> str:
    """A difference of two test errors, in percentage points."""
    return f"{units.significant(100 * share, 2)}{units.SPACE}points" if share else "0"


def of_trainings(convergence: Convergence, store: Store) -> Table:
    """A row for each configuration that was trained."""
    note = f"{printable(store.study.model)}, {convergence.epochs:g} epochs"
    rows = [_curve_cells(convergence, curve) for curve in convergence.curves]
    return Table(rows, [curve.record for curve in convergence.curves], note)


def _curve_cells(convergence: Convergence, curve: ErrorCurve) -> dict[str, str]:
    weights = "not finished"
    if curve is convergence.reference:
        weights = "the reference"
    elif curve.finished:
        weights = "the same bits" if convergence.same_weights(curve) else "other bits"
    error, loss, places = curve.distance_error, curve.distance_loss, units.percent_places(convergence.images)
    return {
        "trained": curve.name,
        "devices": str(curve.devices),
        "updates": units.count(curve.updates),
        "test error": f"{units.decimal(100 * curve.test_error, places)}{units.SPACE}%",
        "test loss": units.significant(curve.test_loss),
        "trained in": units.duration(curve.train_s),
        "distance: error": units.UNKNOWN if error is None else points(error),
        "loss": units.UNKNOWN if loss is None else units.significant(loss, 2),
        "final weights": weights,
    }
