"""The pictures of a study: speed-up over devices, parts of an update, predictions, and curves of the test error.

Those are over time and over updates, where they coincide (Yadan et al., 2013, Figure 1).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from convoy import units
from convoy.bench.records import COMMUNICATION, COMPUTE, CONVOY, INPUT, OPTIMIZER, TORCH, short
from convoy.bench.results import Convergence, ErrorCurve, Named, Results, StudyRow, signed
from convoy.report import axes as ax
from convoy.report.pages import Drawing, Panel, drawn
from convoy.units import seconds as time_of

PARTS = {
    COMPUTE: ("computing", ax.TRAIN),
    COMMUNICATION: ("exposed communication", ax.TEST),
    INPUT: ("input", ax.OCHRE),
    OPTIMIZER: ("optimizer", ax.GREEN),
}
SHORT = {"ddp": "DDP", "fabric": "Fabric", "accelerate": "accelerate", TORCH: "PyTorch"}
_ROW, _SIDE, _STRIP = 31, 8, 52  # in points: height of a row, the margin left of rows, height of the strip
_PALE: dict[str, Any] = {"color": ax.MUTED, "alpha": 0.45}


def panels(results: Results) -> list[Panel]:
    """All pictures of a table, in the order of the report."""
    nothing, several = "Nothing has been measured yet.", "Nothing has been measured on several devices yet."
    return [
        drawn("speed-up", "Speed-up over devices", partial(_speedups, results), several),
        drawn("parts", "Where an update's time goes", partial(_parts, results), nothing),
        drawn("predictions", "Predicted and measured", partial(_predictions, results), "Nothing was predicted."),
    ]


def convergence_panels(convergence: Convergence) -> list[Panel]:
    """Test error over time and over updates."""
    nothing = "No configuration has been evaluated yet."
    return [
        drawn("error-time", "Test error over time", partial(_over_time, convergence), nothing),
        drawn("error-updates", "Test error over updates", partial(_over_updates, convergence), nothing),
    ]


def _series(results: Results) -> dict[str, list[StudyRow]]:
    """Rows that differ by their devices only, by name; each begins at one device, if that was measured."""
    several, reference = [row for row in results.rows if row.devices > 1], results.reference
    lines = {}
    for series in dict.fromkeys(row.series for row in several):
        rows = sorted((row for row in several if row.series == series), key=lambda row: row.devices)
        alone = [row for row in results.rows if row.devices == 1 and (row.kind == CONVOY) == (rows[0].kind == CONVOY)]
        first = alone[:1] or ([reference] if reference is not None and reference.devices == 1 else [])
        lines[SHORT.get(series, short(series) if "\n" not in series else "plan")] = [*first, *rows]
    return lines


def _speedups(results: Results, title: str) -> Drawing:
    """Images per second over those of the reference, against the devices."""
    lines = _series(results)
    if not lines:
        return None
    everyone = [row for rows in lines.values() for row in rows]
    ideals = {row.devices: row.ideal for row in sorted(everyone, key=lambda row: row.devices)}
    axes = ax.panel(title, "devices", ["ideal", *lines])
    axes.plot(list(ideals), list(ideals.values()), color=ax.MUTED, linestyle=ax.DASHES[2], label="ideal")
    smallest, largest = min(ideals), max(ideals)
    bars: dict[str, Any] = {"linewidth": 1.5, "elinewidth": 1, "capsize": 3, "markersize": 5, "clip_on": False}
    for place, (label, rows) in enumerate(lines.items()):
        # spreads stand aside, so that those of several series do not lie on each other
        aside = 0.02 * largest * (place - (len(lines) - 1) / 2) / max(1, len(lines) - 1)
        x = [row.devices + (aside if row.devices > 1 else 0) for row in rows]
        y, spread = np.array([(row.speedup, row.speedup_spread or 0.0) for row in rows]).T
        axes.errorbar(x, y, yerr=(np.minimum(y, spread), spread), label=label, **bars, **ax.look(place))
    axes.set_ylim(0, 1.05 * max(*ideals.values(), *(row.speedup + (row.speedup_spread or 0) for row in everyone)))
    axes.set_xlim(smallest - 0.04 * largest, 1.04 * largest)
    ax.set_ticks(axes.yaxis, 6)
    ax.ticks_at(axes.xaxis, list(ideals))
    several = ((label, row) for label, rows in lines.items() for row in rows if row.devices > 1)
    sentences = (f"{label}: {row.speedup:.2f} on {row.devices}." for label, row in several)
    return " ".join(sentences), ax.with_legend(axes)


def _rows(title: str, rows: Sequence[StudyRow], longest: float, notes: Sequence[str], words: Sequence[str]) -> Axes:
    """A panel with a line for each row on one axis of milliseconds or seconds: its name, and a note at the right; what
    is drawn for row n belongs at the height n."""
    unit, factor = ("s", 1.0) if longest >= 2 else ("ms", 1e3)
    axes = ax.panel(title, f"{unit} an update", words, height=_ROW * len(rows), left=_SIDE, grid="x")
    axes.set_xlim(0, 1.02 * longest)
    axes.set_ylim(len(rows) - 0.66, -0.66)
    axes.yaxis.set_major_locator(NullLocator())
    ax.set_ticks(axes.xaxis, 6, factor=factor)
    for level, (row, note) in enumerate(zip(rows, notes, strict=True)):
        axes.text(0, level - 0.3, _name(row), va="bottom", ha="left", size=10.5)
        axes.text(1.02 * longest, level - 0.3, note, va="bottom", ha="right", size=10.5, color=ax.MUTED)
    return axes


def _name(row: Named) -> str:
    return units.shorten(row.where, 42)


def _parts(results: Results, title: str) -> Drawing:
    rows, words = results.rows, [word for word, _ in PARTS.values()]
    if not rows:
        return None
    axes = _rows(title, rows, max(row.step_s for row in rows), [time_of(row.step_s) for row in rows], words)
    starts = np.zeros(len(rows))
    look: dict[str, Any] = {"height": 0.36, "edgecolor": ax.PAPER, "linewidth": 0.6}
    for part, (word, color) in PARTS.items():
        seconds = [row.parts[part] for row in rows]
        axes.barh(range(len(rows)), seconds, left=starts, color=color, label=word, **look)
        starts += seconds
    sentences = (
        f"{_name(row)}: {', '.join(f'{word} {time_of(row.parts[part])}' for part, (word, _) in PARTS.items())}."
        for row in rows
    )
    return " ".join(sentences), ax.with_legend(axes)


def _predictions(results: Results, title: str) -> Drawing:
    """Predicted and measured time of an update, with its spread, for each row that has a prediction."""
    pairs = [(row, row.predicted_s) for row in results.rows if row.predicted_s is not None]
    if not pairs:
        return None
    rows = [row for row, _ in pairs]
    levels, seconds, spreads = range(len(rows)), [row.step_s for row in rows], [row.spread_s or 0.0 for row in rows]
    predicted = [prediction for _, prediction in pairs]
    longest = max(*predicted, *(row.step_s + (row.spread_s or 0) for row in rows))
    words = ["predicted", "measured, ± spread"]
    axes = _rows(title, rows, longest, [signed(row.prediction_error or 0.0) for row in rows], words)
    axes.hlines(levels, seconds, predicted, color=ax.MUTED, linewidth=1)
    look: dict[str, Any] = {"linestyle": "none", "markersize": 6}
    hollow: dict[str, Any] = {"marker": "D", "markerfacecolor": "none", "markeredgewidth": 1.5}
    axes.plot(predicted, levels, color=ax.TEST, label=words[0], **look, **hollow)
    bars: dict[str, Any] = {"marker": "o", "capsize": 3, "elinewidth": 1}
    axes.errorbar(seconds, levels, xerr=spreads, color=ax.TRAIN, label=words[1], **look, **bars)
    sentences = (f"{_name(row)}: predicted {time_of(p)}, measured {time_of(row.step_s)}." for row, p in pairs)
    return " ".join(sentences), ax.with_legend(axes)


def _over_time(convergence: Convergence, title: str) -> Drawing:
    if convergence.reference is None:
        return None
    last = max(curve.train_s for curve in convergence.curves)
    size, unit = ax.time_unit(last)
    times = [curve.seconds / size for curve in convergence.curves]
    axes = _curves(convergence, title, f"{unit} of training", times, {"color": ax.INK, "linewidth": 1.6})
    ax.course_axis(axes, last / size)
    sentences = (
        f"{_name(curve)}: {units.significant(100 * curve.test_error)}{units.SPACE}% after "
        f"{units.duration(curve.train_s)}."
        for curve in convergence.curves
    )
    return " ".join(sentences), ax.with_legend(axes)


def _over_updates(convergence: Convergence, title: str) -> Drawing:
    """The curves, and under them how far each is from the serial one.

    The reference is a wide pale line, so that it is seen with those that lie on it.
    """
    reference = convergence.reference
    if reference is None:
        return None
    steps, base = [curve.steps for curve in convergence.curves], _name(reference)
    axes = _curves(convergence, title, "", steps, {**_PALE, "linewidth": 6}, below=_STRIP + ax.UNDER)
    strip = ax.under(axes, f"Distance from {base}, percentage points", "updates", _STRIP)
    _draw_distances(strip, convergence, reference)
    for part in (axes, strip):
        ax.course_axis(part, max(curve.updates for curve in convergence.curves), integer=True)
    sentences = (
        f"{_name(curve)}: at most {units.significant(100 * (curve.distance_error or 0.0))} points from {base}."
        for curve in convergence.compared
    )
    return " ".join(sentences), ax.with_legend(axes)


def _curves(
    convergence: Convergence,
    title: str,
    xlabel: str,
    places: Sequence[np.ndarray],
    reference: Mapping[str, Any],
    below: float = 0,
) -> Axes:
    """A panel of all curves over `places`, the x values of each one's evaluations; `below` points stay free under
    it."""
    names = [_name(curve) for curve in convergence.curves]
    axes = ax.panel(f"{title}, %", xlabel, names, below=below)
    for name, curve, x in zip(names, convergence.curves, places, strict=True):
        is_reference = curve is convergence.reference and len(convergence.curves) > 1
        look = reference if is_reference else _marked(convergence, curve, len(x))
        axes.plot(x, 100 * curve.errors, label=name, clip_on=False, **look)
    ax.wide_axis(axes, 100 * np.concatenate([curve.errors for curve in convergence.curves]))
    return axes


def _marked(convergence: Convergence, curve: ErrorCurve, points: int) -> dict[str, Any]:
    """Color, line and marks of a curve; no two have their marks at the same evaluations, where there are enough."""
    exact_curves = [drawn_curve for drawn_curve in convergence.curves if drawn_curve is not convergence.reference]
    place = exact_curves.index(curve) if curve in exact_curves else 0
    interval = min(len(exact_curves), max(1, points // 3)) or 1
    colors = [color for color in ax.COLORS if color != ax.INK]  # which the reference has
    return {**ax.look(place, colors), "markevery": (place % interval, interval), "markersize": 4.5, "linewidth": 1.2}


def _draw_distances(axes: Axes, convergence: Convergence, reference: ErrorCurve) -> None:
    axes.spines["bottom"].set_visible(False)
    axes.axhline(0, **_PALE, linewidth=4)
    for curve in convergence.compared:
        steps, mine, base = np.intersect1d(curve.steps, reference.steps, return_indices=True)
        distances = 100 * (curve.errors[mine] - reference.errors[base])
        axes.plot(steps, distances, clip_on=False, **_marked(convergence, curve, len(steps)))
    largest = 100 * max((curve.distance_error or 0.0 for curve in convergence.compared), default=0.0)
    axes.set_ylim(-1.15 * largest or -1, 1.15 * largest or 1)
    ax.set_ticks(axes.yaxis, 3, None, symmetric=True)
