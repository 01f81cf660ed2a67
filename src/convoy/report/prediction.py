"""`prediction.json` of a run: an update as it was predicted and as it was measured, made ready for the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convoy.planner.comparison import WORDS, Both, Comparison, apart, difference, shown

_COLORS = {
    "input": "input",
    "forward": "forward",
    "backward": "backward",
    "rest": "around",
    "packing": "packing",
    "waiting": "transfer",
    "stages": "idle",
    "optimizer": "update",
}


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
    """The page's section on an update."""

    found: Comparison
    sentence: str  # on the whole update
    both: bool  # whether there is a prediction
    whole: ComparedRow  # all parts together, with bars
    parts: tuple[ComparedRow, ...]  # without bars
    groups: tuple[ComparedRow, ...]  # with bars of what they compute and what they wait
    sum: str  # what the measured parts add up to, and why that is not what an update takes


def compared(comparison: Comparison | None) -> Compared | None:
    """The section on an update; None where nothing was measured."""
    if comparison is None or comparison.update.measured_s is None:
        return None
    parts = {name: both for name, both in comparison.parts.items() if name in WORDS and both.longest > 0}
    predicted = sum(both.predicted_s or 0.0 for both in parts.values()) or None
    whole = Both(predicted, sum(both.measured_s or 0.0 for both in parts.values()))
    sentence = f"An update took {shown(comparison.update.measured_s)}, the median of {comparison.timed}"
    if off := _difference(comparison.update):
        sentence += f"; {shown(comparison.update.predicted_s)} were predicted ({off})"
    groups = [(one, _sum([one.computes, one.waits])) for one in comparison.groups]
    longest = max((total.longest for _, total in groups), default=0.0) or 1.0
    return Compared(
        found=comparison,
        sentence=f"{sentence}.",
        both=comparison.update.predicted_s is not None,
        whole=_row("All parts", "", whole, _tracks(parts, max(whole.longest, 1e-12))),
        parts=tuple(_row(WORDS[name], _COLORS[name], both) for name, both in parts.items()),
        groups=tuple(
            _row(one.title, "", total, _tracks({"forward": one.computes, "waiting": one.waits}, longest))
            for one, total in groups
        ),
        sum=f"{shown(whole.measured_s)}{apart(whole.measured_s or 0.0, comparison.update.measured_s)}",
    )


def _row(name: str, color: str, both: Both, tracks: tuple[Track, ...] = ()) -> ComparedRow:
    return ComparedRow(name, color, tracks, shown(both.predicted_s), shown(both.measured_s), _difference(both))


def _difference(both: Both) -> str:
    if not both.predicted_s or both.error is None:
        return ""
    return difference(both.error) if both.error < 9.995 else f"{both.error + 1:.0f} ×"


def _tracks(parts: Mapping[str, Both], longest: float) -> tuple[Track, ...]:
    tracks = []
    for side in ("predicted", "measured"):
        seconds = {name: getattr(both, f"{side}_s") for name, both in parts.items()}
        drawn = tuple(
            (_COLORS[name], 100 * number / longest, f"{WORDS[name]}, {side}: {shown(number)}")
            for name, number in seconds.items()
            if number
        )
        if any(number is not None for number in seconds.values()):
            tracks.append(Track(side, drawn))
    return tuple(tracks)


def _sum(several: Sequence[Both]) -> Both:
    predicted = [one.predicted_s for one in several if one.predicted_s is not None]
    measured = [one.measured_s for one in several if one.measured_s is not None]
    return Both(sum(predicted) if predicted else None, sum(measured) if measured else None)
