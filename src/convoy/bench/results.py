"""From the document of a study to the rows of its table, and how far a median of a few rounds can be trusted."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convoy.bench.configuration import AUTO, CONVOY, PEERS
from convoy.bench.curves import where
from convoy.bench.measurement import COMMUNICATION, COMPUTE, INPUT, OPTIMIZER
from convoy.bench.store import found_shares, plan_of
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
    """A configuration that was measured.

    Attributes:
        key: different for every row.
        label: for people.
        kind, devices: of the configuration.
        plan: that ran; None for peers.
        series: rows of one series differ by their devices only; empty on one device.
        batch: samples of an update.
        seconds: of an update: the median over the rounds of each round's median.
        spread: by which two such medians differ at most; None of one round.
        place: of one device alone, which one it is, from 0.
        microbatches: of an update, that each rank had in the last round; empty where that is not known.
        uneven: whether the parts of the batch are by shares: the row's, or those that the planner found.
        speedup: images per second over those of the reference.
        speedup_spread: by which that would differ at most.
        efficiency: the speed-up by the ideal one; None where nothing was measured on one device.
        ideal: the number of devices by that of the reference; of unequal ones, the sum of their speeds by the
            first one's, as they were measured one by one or else as the emulated cluster's file says.
        days: that the training would take; None where nobody asked.
        parts: seconds of an update that go to what, on the rank that waits least for others.
        memory: bytes of the rank that needs most.
        predicted: seconds of an update; None where nothing is.
        predicted_parts: the same by what they go to.
        predicted_memory: bytes.
        rounds: so many.
        overhead: seconds that taking the time adds to an update.
    """

    key: str
    label: str
    kind: str
    devices: int
    plan: str | None
    series: str
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
    predicted_parts: Mapping[str, float]
    predicted_memory: int | None
    rounds: int
    overhead: float
    place: int = 0
    microbatches: tuple[int, ...] = ()
    uneven: bool = False

    @property
    def images_per_s(self) -> float:
        """Of all devices together."""
        return self.batch / self.seconds

    @property
    def error(self) -> float | None:
        """Of the prediction, as a part of what was measured."""
        return None if self.predicted is None else self.predicted / self.seconds - 1


@dataclass(frozen=True)
class Cost:
    """What the measuring took.

    Attributes:
        wall: seconds of all calls of the command, without those of trainings.
        planning: of these, of predictions.
        timed: of these, of the updates that count.
    """

    wall: float
    planning: float
    timed: float


@dataclass(frozen=True)
class Results:
    """All rows of a study.

    Attributes:
        reference: the row that speed-ups are over: the fastest on one device, or else the first on the fewest.
        alone: images per second of each device by itself; empty where that was not measured.
        failed: label and reason of those that could not be measured.
        waiting: labels of those that have not had a turn yet.
        loss_difference: largest difference of the first update's loss between rows of Convoy, as a part of it.
        notes: of the planner, by number of devices.
    """

    rows: tuple[StudyRow, ...]
    reference: StudyRow | None
    alone: tuple[float, ...]
    failed: tuple[tuple[str, str], ...]
    waiting: tuple[str, ...]
    loss_difference: float | None
    cost: Cost
    notes: tuple[str, ...]


def results(document: Mapping[str, Any], epochs: float | None, dataset_size: int) -> Results:
    """The rows of a document.

    Args:
        document: as `Store` keeps it.
        epochs: for the days that training would take; None leaves them out.
        dataset_size: images of an epoch.
    """
    configurations: list[dict[str, Any]] = document["configurations"]
    measured = [row for row in configurations if row["visits"]]
    reference = _reference(measured)
    rates = {row["key"]: _rates(row, _batch(document, row)) for row in measured}
    alone = _alone(measured, rates)
    rows = []
    for row in measured:
        rows.append(_row(document, row, rates, reference, alone, epochs and epochs * dataset_size))
    sessions = document["sessions"]
    wall = sum(session["wall_s"] - session.get("training_s", 0.0) for session in sessions)
    timed = sum(_timed(one) for row in measured for one in row["visits"])
    return Results(
        rows=tuple(rows),
        reference=next((row for row in rows if reference is not None and row.key == reference["key"]), None),
        alone=tuple(alone),
        failed=tuple((where(row), str(row["failed"])) for row in configurations if row["failed"]),
        waiting=tuple(where(row) for row in configurations if not row["visits"] and not row["failed"])
        if document["table"].get("rounds", 1)
        else (),
        loss_difference=None if document["study"]["weak"] else _loss_difference(measured),
        cost=Cost(wall, sum(session["planning_s"] for session in sessions), timed),
        notes=tuple(
            f"{plural(int(number), 'device')}: {note}"
            for number, found in document["forecasts"].items()
            for note in found["notes"]
        ),
    )


def _batch(document: Mapping[str, Any], row: Mapping[str, Any]) -> int:
    study = document["study"]
    return int(study["batch"]) * (int(row["devices"]) if study["weak"] else 1)


def _reference(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What is fastest on one device, whoever it is, as a slow start would flatter all that comes after it; where
    nothing was measured on one, what was asked for first on the fewest."""
    usual = [row for row in rows if not row.get("place")]
    first = min(usual or rows, key=lambda row: int(row["devices"]), default=None)
    ones = [row for row in usual if row["devices"] == 1]
    return min(ones, key=_seconds) if ones else first


def _seconds(row: Mapping[str, Any]) -> float:
    return float(statistics.median(_seconds_of(measurement) for measurement in row["visits"]))


def _seconds_of(measurement: Mapping[str, Any]) -> float:
    return max(float(statistics.median(rank["seconds"])) for rank in measurement["ranks"])


def _timed(measurement: Mapping[str, Any]) -> float:
    return max(float(sum(rank["seconds"]) + sum(rank.get("without", ()))) for rank in measurement["ranks"])


def _rates(row: Mapping[str, Any], batch: int) -> dict[int, float]:
    return {measurement["round"]: batch / _seconds_of(measurement) for measurement in row["visits"]}


def _row(
    document: Mapping[str, Any],
    row: Mapping[str, Any],
    rates: Mapping[str, Mapping[int, float]],
    reference: Mapping[str, Any] | None,
    alone: Sequence[float],
    images: float | None,
) -> StudyRow:
    devices, batch, measurements = int(row["devices"]), _batch(document, row), row["visits"]
    each = [_seconds_of(measurement) for measurement in measurements]
    seconds = statistics.median(each)
    assert reference is not None
    base = rates[reference["key"]]
    own = rates[row["key"]]
    ideal = _together(document, devices, alone) / _together(document, int(reference["devices"]), alone)
    ratios = [own[number] / base[number] for number in own if number in base]
    speedup = statistics.median(own.values()) / statistics.median(base.values())
    forecast = document["forecasts"].get(str(devices)) or {"predictions": {}}
    plan = plan_of(document, row)
    by_speed = found_shares(document, row) is not None
    foretold = row["kind"] == CONVOY and _foretold(document, row)
    predicted = forecast["predictions"].get(AUTO if by_speed else plan) if foretold else None
    return StudyRow(
        key=row["key"],
        label=row["label"],
        kind=row["kind"],
        devices=devices,
        plan=plan,
        series=row["series"],
        batch=batch,
        seconds=seconds,
        spread=repeatability(each),
        speedup=speedup,
        speedup_spread=repeatability(ratios) if row["key"] != reference["key"] else None,
        efficiency=speedup / ideal if reference["devices"] == 1 else None,
        ideal=ideal,
        days=images / batch * seconds / DAY_S if images is not None else None,
        parts=_parts(row["kind"], measurements, seconds),
        memory=max(rank["memory"] for measurement in measurements for rank in measurement["ranks"]),
        predicted=predicted["seconds"] if predicted else None,
        predicted_parts=predicted["parts"] if predicted else {},
        predicted_memory=predicted["memory"] if predicted else None,
        rounds=len(measurements),
        overhead=statistics.median(rank["overhead"] for measurement in measurements for rank in measurement["ranks"]),
        place=row.get("place", 0),
        microbatches=tuple(rank.get("microbatches", 0) for rank in measurements[-1]["ranks"]),
        uneven=", shares" in row["series"] or by_speed,
    )


def _together(document: Mapping[str, Any], devices: int, alone: Sequence[float]) -> float:
    speeds = alone if len(alone) >= devices > 1 else document["study"].get("speeds") or [1.0] * devices
    return sum(speeds[:devices]) / speeds[0]


def _foretold(document: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    own = row.get("shares") or document["study"]["recipe"]["parallel"].get("shares")
    return not row.get("place") and (int(row["devices"]) == 1 or not own)


def _alone(rows: Sequence[Mapping[str, Any]], rates: Mapping[str, Mapping[int, float]]) -> list[float]:
    """Images per second of each device by itself, as far as they were measured without a gap; none of one alone."""
    ones = [row for row in rows if row["kind"] == CONVOY and row["devices"] == 1]
    found = {row.get("place", 0): statistics.median(rates[row["key"]].values()) for row in reversed(ones)}
    known = [found[place] for place in range(len(found)) if place in found]
    return known if len(known) > 1 else []


def _parts(kind: str, measurements: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, float]:
    """Medians over the rounds; computing is what the others leave of the time of an update."""
    found: dict[str, list[float]] = {COMMUNICATION: [], INPUT: [], OPTIMIZER: []}
    for measurement in measurements:
        medians = [
            {part: statistics.median(rank[part]) for part in (COMMUNICATION, INPUT, OPTIMIZER)}
            for rank in measurement["ranks"]
        ]
        busiest = min(medians, key=lambda rank: rank[COMMUNICATION])
        if kind in PEERS:
            alone = max(statistics.median(rank["without"]) for rank in measurement["ranks"])
            busiest = {**busiest, COMMUNICATION: max(0.0, _seconds_of(measurement) - alone)}
        for part, values in found.items():
            values.append(busiest[part])
    parts = {part: statistics.median(values) for part, values in found.items()}
    scale = min(1.0, seconds / max(sum(parts.values()), 1e-12))  # medians need not add up
    parts = {part: scale * value for part, value in parts.items()}
    return {COMPUTE: max(0.0, seconds - sum(parts.values())), **parts}


def _loss_difference(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """By how much the first losses of Convoy's rows differ: all do the same work."""
    losses: list[float] = [
        measurement["loss"] for row in rows if row["kind"] == CONVOY for measurement in row["visits"]
    ]
    if len(losses) < 2 or not max(map(abs, losses)):
        return None
    return (max(losses) - min(losses)) / max(map(abs, losses))
