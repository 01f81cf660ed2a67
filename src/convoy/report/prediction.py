"""`prediction.json` of a run: an update as it was predicted and as it was measured, made ready for the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from convoy.planner.comparison import WORDS, apart, difference, shown
from convoy.training.records import Number, Record

_COLORS = {
    "input": "input",
    "forward": "forward",
    "backward": "backward",
    "rest": "around",
    "packing": "packing",
    "waiting": "transfer",
    "optimizer": "update",
}
_OLDER = {"optimiser": "optimizer"}


class PredictedAndMeasured(Record):
    """Seconds, each with nothing where it is not known."""

    predicted_s: Number = Field(default=None, ge=0)
    measured_s: Number = Field(default=None, ge=0)


class LayerGroup(Record):
    """Layers that stand together."""

    name: str
    computes: PredictedAndMeasured
    waits: PredictedAndMeasured


class PredictionFile(Record):
    """`prediction.json`, as `convoy.planner.comparison.Comparison` writes it."""

    version: Literal[1]
    plan: str = ""
    rank: int = 0
    timed: int = 0
    watched: int = 0
    learned: int = 0
    update: PredictedAndMeasured = PredictedAndMeasured()
    parts: dict[str, PredictedAndMeasured] = Field({})
    groups: list[LayerGroup] = Field([])
    notes: list[str] = Field([])
    one_device_s: Number = Field(default=None, ge=0)

    @field_validator("parts", mode="before")
    @classmethod
    def _older_spelling(cls, parts: object) -> object:
        return {_OLDER.get(name, name): part for name, part in parts.items()} if isinstance(parts, dict) else parts

    @property
    def error(self) -> float | None:
        """By which part of the measured update the predicted one is longer; None where one of them is not known."""
        predicted, measured = self.update.predicted_s, self.update.measured_s
        return None if predicted is None or not measured else predicted / measured - 1


@dataclass(frozen=True)
class Track:
    """A bar: its parts as color, share of the longest bar, and text."""

    name: str
    parts: tuple[tuple[str, float, str], ...]


@dataclass(frozen=True)
class ComparedRow:
    """Predicted beside measured, drawn and in numbers; empty where there is nothing."""

    name: str
    color: str
    tracks: tuple[Track, ...]
    predicted: str
    measured: str
    difference: str


@dataclass(frozen=True)
class Compared:
    """What the page shows.

    Attributes:
        sentence: of the whole update.
        both: whether there is a prediction.
        whole: all parts together, with bars.
        parts: without bars.
        groups: with bars of what they compute and what they wait.
        legend: color and word of every part that there is.
        sum: what the measured parts add up to, and why that is not what an update takes.
    """

    sentence: str
    both: bool
    whole: ComparedRow
    parts: tuple[ComparedRow, ...]
    groups: tuple[ComparedRow, ...]
    legend: tuple[tuple[str, str], ...]
    rank: int
    watched: int
    learned: int
    sum: str
    notes: tuple[str, ...]


def compared(found: PredictionFile | None) -> Compared | None:
    """What there is to show; None where nothing was measured."""
    if found is None or found.update.measured_s is None:
        return None
    parts = {name: both for name, both in found.parts.items() if name in WORDS and _longest(both) > 0}
    whole = PredictedAndMeasured(
        predicted_s=sum(both.predicted_s or 0.0 for both in parts.values()) or None,
        measured_s=sum(both.measured_s or 0.0 for both in parts.values()),
    )
    longest = max(_longest(whole), 1e-12)
    longest_group = max([_longest(_total(one)) for one in found.groups] or [0.0]) or 1.0
    return Compared(
        sentence=_sentence(found),
        both=found.update.predicted_s is not None,
        whole=_row("All parts", "", whole, _tracks(list(parts.items()), longest)),
        parts=tuple(_row(WORDS[name], _COLORS[name], both) for name, both in parts.items()),
        groups=tuple(
            _row(one.name, "", _total(one), _tracks([("forward", one.computes), ("waiting", one.waits)], longest_group))
            for one in found.groups
        ),
        legend=tuple((_COLORS[name], WORDS[name]) for name in parts),
        rank=found.rank,
        watched=found.watched,
        learned=found.learned,
        sum=f"{shown(whole.measured_s)}{apart(whole.measured_s or 0.0, found.update.measured_s)}",
        notes=tuple(found.notes),
    )


def _sentence(found: PredictionFile) -> str:
    took = f"An update took {shown(found.update.measured_s)}, the median of {found.timed}"
    off = _difference(found.update)
    return f"{took}; {shown(found.update.predicted_s)} were predicted ({off})." if off else f"{took}."


def _row(name: str, color: str, both: PredictedAndMeasured, tracks: tuple[Track, ...] = ()) -> ComparedRow:
    return ComparedRow(name, color, tracks, shown(both.predicted_s), shown(both.measured_s), _difference(both))


def _difference(both: PredictedAndMeasured) -> str:
    if not both.predicted_s or not both.measured_s:
        return ""
    error = both.predicted_s / both.measured_s - 1
    return difference(error) if error < 9.995 else f"{error + 1:.0f} ×"


def _tracks(parts: Sequence[tuple[str, PredictedAndMeasured]], longest: float) -> tuple[Track, ...]:
    found = []
    for side in ("predicted", "measured"):
        seconds = [(name, getattr(both, f"{side}_s")) for name, both in parts]
        if any(number is not None for _, number in seconds):
            found.append(
                Track(
                    side,
                    tuple(
                        (_COLORS[name], 100 * number / longest, f"{WORDS[name]}, {side}: {shown(number)}")
                        for name, number in seconds
                        if number
                    ),
                )
            )
    return tuple(found)


def _total(group: LayerGroup) -> PredictedAndMeasured:
    both = (group.computes, group.waits)
    first = [one.predicted_s for one in both if one.predicted_s is not None]
    second = [one.measured_s for one in both if one.measured_s is not None]
    return PredictedAndMeasured(predicted_s=sum(first) if first else None, measured_s=sum(second) if second else None)


def _longest(both: PredictedAndMeasured) -> float:
    return max(both.predicted_s or 0.0, both.measured_s or 0.0)
