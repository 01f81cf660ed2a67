"""From the file of a study to the rows of its table, and how far a median of a few rounds can be trusted."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    short,
)
from convoy.bench.store import Store
from convoy.units import plural

_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t at 97.5 % for 1, 2, … degrees of freedom."""
_EFFICIENCY = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, where values are normal and not too few."""


def repeatability(values: Sequence[float]) -> float | None:
    """What the medians of two series like this one differ by at most, in 95 of 100 cases (ISO 5725-6, 4.1.4).

    t · √2 · √(π/2) · s / √n, for the standard deviation s of n values; None of fewer than two.
    """
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    t = _T[freedom - 1] if freedom <= len(_T) else 1.96 + 2.4 / freedom
    return t * math.sqrt(2) * _EFFICIENCY * statistics.stdev(values) / math.sqrt(len(values))


DAY_S = 86_400


@dataclass(frozen=True)
class StudyRow:
    """A configuration that was measured; seconds are those of an update.

    Attributes:
        key, kind, devices, series, place: of the configuration.
        label: for people.
        plan: that ran; None for peers.
        batch: samples of an update.
        seconds: the median over the rounds of each round's median.
        spread: by which two such medians differ at most; None of one round.
        speedup: images per second over those of the reference.
        speedup_spread: by which that would differ at most.
        efficiency: the speed-up by the ideal one; None where nothing was measured on one device.
        ideal: the number of devices by that of the reference; of unequal ones, the sum of their speeds by the
            first one's, as they were measured one by one or else as the emulated cluster's file says.
        days: of the training; None where nobody asked.
        parts: seconds by what they go to, on the rank that waits least for others.
        memory: bytes of the rank that needs most.
        predicted: seconds; None where nothing is.
        predicted_memory: bytes.
        overhead: seconds that taking the time adds.
        microbatches: of each rank in the last round; empty where that is not known.
        uneven: whether the parts of the batch are by shares: the row's, or those that the planner found.
    """

    key: str
    label: str
    kind: str
    devices: int
    series: str
    place: int
    plan: str | None
    batch: int
    seconds: float
    spread: float | None
    speedup: float
    speedup_spread: float | None
    efficiency: float | None
    ideal: float
    days: float | None
    parts: Mapping[str, float]
    memory: int
    predicted: float | None
    predicted_memory: int | None
    rounds: int
    overhead: float
    microbatches: tuple[int, ...]
    uneven: bool

    @property
    def images_per_s(self) -> float:
        """Of all devices together."""
        return self.batch / self.seconds

    @property
    def error(self) -> float | None:
        """Of the prediction, as a part of what was measured."""
        return None if self.predicted is None else self.predicted / self.seconds - 1

    @property
    def found_plan(self) -> str:
        """The plan that the planner took; empty where it was not asked."""
        return self.plan if self.plan and self.label.startswith(AUTO) else ""

    @property
    def name(self) -> str:
        """The label in short."""
        return short(self.label)

    @property
    def plan_label(self) -> str:
        """The name with the plan that the planner took, if that is one line."""
        return self.name if "\n" in self.found_plan or not self.found_plan else f"{self.name}: {short(self.found_plan)}"


@dataclass(frozen=True)
class Results:
    """All rows of a study.

    Attributes:
        reference: the row that speed-ups are over: the fastest on one device, or else the first on the fewest.
        alone: images per second of each device by itself; empty where that was not measured.
        failed: label and reason of those that could not be measured.
        waiting: labels of those that have not had a turn yet.
        loss_difference: largest difference of the first update's loss between rows of Convoy, as a part of it.
        wall: seconds of all calls of the command, without those of trainings.
        planning: of these, seconds of predictions.
        timed: of these, seconds of the updates that count.
        notes: of the planner, by number of devices.
    """

    rows: tuple[StudyRow, ...]
    reference: StudyRow | None
    alone: tuple[float, ...]
    failed: tuple[tuple[str, str], ...]
    waiting: tuple[str, ...]
    loss_difference: float | None
    wall: float
    planning: float
    timed: float
    notes: tuple[str, ...]

    @property
    def has_one_reference(self) -> bool:
        """Whether one row alone was measured on one device, which needs no explanation as the reference."""
        return sum(row.devices == 1 and not row.place for row in self.rows) == 1


def results(store: Store) -> Results:
    """The rows of a study."""
    measured = [row for row in store.configurations if row.visits]
    reference = _reference(measured)
    rates = {row.key: _rates(row, store.study.batch_on(row.devices)) for row in measured}
    alone = _alone(measured, rates)
    rows = tuple(_row(store, row, rates, reference, alone) for row in measured if reference is not None)
    losses = [one.loss for row in measured if row.kind == CONVOY for one in row.visits]
    largest = max(map(abs, losses), default=0.0)
    is_compared = len(losses) > 1 and largest and not store.study.weak
    waiting = [row.where for row in store.configurations if not row.visits and not row.failed]
    timed = [max(sum(rank.seconds) + sum(rank.without) for rank in one.ranks) for row in measured for one in row.visits]
    return Results(
        rows=rows,
        reference=next((row for row in rows if reference is not None and row.key == reference.key), None),
        alone=tuple(alone),
        failed=tuple((row.where, row.failed) for row in store.configurations if row.failed),
        waiting=tuple(waiting) if store.table.rounds else (),
        loss_difference=(max(losses) - min(losses)) / largest if is_compared else None,
        wall=sum(session.wall_s - session.training_s for session in store.sessions),
        planning=sum(session.planning_s for session in store.sessions),
        timed=sum(timed),
        notes=tuple(
            f"{plural(devices, 'device')}: {note}" for devices, one in store.forecasts.items() for note in one.notes
        ),
    )


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


def _rates(row: Configuration, batch: int) -> dict[int, float]:
    return {measurement.round: batch / _seconds(measurement) for measurement in row.visits}


def _row(
    store: Store,
    row: Configuration,
    rates: Mapping[str, Mapping[int, float]],
    reference: Configuration,
    alone: Sequence[float],
) -> StudyRow:
    devices, batch = row.devices, store.study.batch_on(row.devices)
    each = [_seconds(measurement) for measurement in row.visits]
    seconds = statistics.median(each)
    base, own = rates[reference.key], rates[row.key]
    ideal = _together(store, devices, alone) / _together(store, reference.devices, alone)
    ratios = [own[number] / base[number] for number in own if number in base]
    speedup = statistics.median(own.values()) / statistics.median(base.values())
    plan, by_speed = store.plan_of(row), store.found_shares(row) is not None
    predicted = None
    if devices in store.forecasts and _is_predicted(store, row):
        predicted = store.forecasts[devices].predictions.get(AUTO if by_speed else plan or "")
    ranks = [rank for measurement in row.visits for rank in measurement.ranks]
    epochs, images = store.table.epochs, store.table.dataset_size
    return StudyRow(
        key=row.key,
        label=row.label,
        kind=row.kind,
        devices=devices,
        series=row.series,
        place=row.place,
        plan=plan,
        batch=batch,
        seconds=seconds,
        spread=repeatability(each),
        speedup=speedup,
        speedup_spread=repeatability(ratios) if row.key != reference.key else None,
        efficiency=speedup / ideal if reference.devices == 1 else None,
        ideal=ideal,
        days=epochs * images / batch * seconds / DAY_S if epochs is not None else None,
        parts=_parts(row, seconds),
        memory=max(rank.memory for rank in ranks),
        predicted=predicted.seconds if predicted else None,
        predicted_memory=predicted.memory if predicted else None,
        rounds=len(row.visits),
        overhead=statistics.median(rank.overhead for rank in ranks),
        microbatches=tuple(rank.microbatches for rank in row.visits[-1].ranks),
        uneven=", shares" in row.series or by_speed,
    )


def _together(store: Store, devices: int, alone: Sequence[float]) -> float:
    speeds = alone if len(alone) >= devices > 1 else store.study.speeds or [1.0] * devices
    return sum(speeds[:devices]) / speeds[0]


def _is_predicted(store: Store, row: Configuration) -> bool:
    own = row.shares or store.study.recipe["parallel"].get("shares")
    return row.kind == CONVOY and not row.place and (row.devices == 1 or not own)


def _alone(rows: Sequence[Configuration], rates: Mapping[str, Mapping[int, float]]) -> list[float]:
    """Images per second of each device by itself, as far as they were measured without a gap; none of one alone."""
    ones = [row for row in rows if row.kind == CONVOY and row.devices == 1]
    found = {row.place: statistics.median(rates[row.key].values()) for row in reversed(ones)}
    known = [found[place] for place in range(len(found)) if place in found]
    return known if len(known) > 1 else []


def _parts(row: Configuration, seconds: float) -> dict[str, float]:
    """Medians over the rounds; computing is what the others leave of the time of an update."""
    names = (COMMUNICATION, INPUT, OPTIMIZER)
    rounds = []
    for measurement in row.visits:
        medians = [{part: statistics.median(getattr(rank, part)) for part in names} for rank in measurement.ranks]
        busiest = min(medians, key=lambda rank: rank[COMMUNICATION])
        if row.kind in PEERS:
            alone = max(statistics.median(rank.without) for rank in measurement.ranks)
            busiest = {**busiest, COMMUNICATION: max(0.0, _seconds(measurement) - alone)}
        rounds.append(busiest)
    parts = {part: statistics.median(one[part] for one in rounds) for part in names}
    scale = min(1.0, seconds / max(sum(parts.values()), 1e-12))  # medians need not add up
    parts = {part: scale * value for part, value in parts.items()}
    return {COMPUTE: max(0.0, seconds - sum(parts.values())), **parts}
