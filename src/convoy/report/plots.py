"""The curves of a run as matplotlib figures: loss and error over updates and over time, learning rate, speed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes

from convoy import units
from convoy.report import axes as ax
from convoy.report.pages import Drawing, Panel, drawn
from convoy.report.run import Run, column
from convoy.run.records import MetricsLine
from convoy.tasks.metric import metric_name

Against = Literal["updates", "time"]
NOTHING = "Nothing has been recorded yet."


@dataclass(frozen=True)
class PlotLine:
    """One line of a panel: y over the lines of a split."""

    label: str
    lines: list[MetricsLine]
    y: np.ndarray
    color: str
    style: str | tuple[float, tuple[float, ...]] = "-"
    marker: str = ""
    width: float = 1.5

    def draw(self, axes: Axes, x: np.ndarray) -> None:
        """Draw it over x [points]; NaN makes a gap, and a point between gaps is a dot so that it is not lost.

        Long curves are drawn as the mean of each of 300 pieces with the range of the piece as a band behind it.
        """
        y = self.y
        if len(x) > 600:
            x, y, low, high = in_pieces(x, y)
            ax.band(axes, x, low, high, self.color)
        marker, size = self.marker if len(x) <= 60 else "", 3.4 if len(x) <= 25 else 2.4
        look: dict[str, Any] = {"linestyle": self.style, "linewidth": self.width, "marker": marker, "markersize": size}
        axes.plot(x, y, color=self.color, label=self.label, clip_on=False, **look)
        padded = np.concatenate(([np.nan], y, [np.nan]))
        dots = np.isfinite(y) & np.isnan(padded[:-2]) & np.isnan(padded[2:])
        if dots.any() and not marker:
            axes.plot(x[dots], y[dots], color=self.color, linestyle="none", marker="o", markersize=3.4, clip_on=False)

    @property
    def is_empty(self) -> bool:
        return not np.isfinite(self.y).any()

    def __str__(self) -> str:
        finite = np.isfinite(self.y)
        values, steps = self.y[finite], column(self.lines, "step")[finite]
        label = self.label[0].upper() + self.label[1:]
        if len(values) == 1:
            return f"{label}: {units.significant(values[0])} at update {units.count(int(steps[0]))}."
        lowest = int(values.argmin())
        return (
            f"{label}: from {units.significant(values[0])} to {units.significant(values[-1])}, lowest "
            f"{units.significant(values[lowest])} at update {units.count(int(steps[lowest]))}."
        )


def in_pieces(x: np.ndarray, y: np.ndarray, pieces: int = 300) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A curve [points] in equal pieces: mean x, and mean, smallest and largest y; a NaN makes its piece NaN."""
    edges = np.linspace(0, len(x), pieces + 1).astype(int)[:-1]
    sizes = np.diff(np.append(edges, len(x)))
    return (
        np.add.reduceat(x, edges) / sizes,
        np.add.reduceat(y, edges) / sizes,
        np.minimum.reduceat(y, edges),
        np.maximum.reduceat(y, edges),
    )


def draw_panels(run: Run) -> list[Panel]:
    """The plots of a run in the order of the report, with title and description."""
    train, test, error = run.metrics.train, run.metrics.test, run.evaluation.calibration_error
    averaged = ", averaged weights" if run.setting("ema.decay") else ""
    tested = run.metrics.split + (", slow weights" if run.setting("lookahead.every") else averaged)

    def compared(name: str, title: str, key: str, errors: str = "") -> list[Panel]:
        """A quantity of both splits over updates and over time; of shares that are right the errors, in a unit."""
        values = [100 * (1 - column(lines, key)) if errors else column(lines, key) for lines in (train, test)]
        learnt = PlotLine("train", train, values[0], ax.TRAIN, width=1.1)
        curves = [learnt, PlotLine(tested, test, values[1], ax.TEST, ax.DASHES[1], "o")]
        against: tuple[Against, ...] = ("updates", "time")
        return [
            drawn(f"{name}-{x}", f"{title} over {x}", partial(_compare, run, curves, x, errors), NOTHING)
            for x in against
        ]

    named = [panel for name in run.named for panel in compared(f"metric-{name}", metric_name(name), name)]
    first = 2 * (run.summary.best_metric in run.named)  # over updates and over time
    outputs = run.evaluation.classes[: len(run.evaluation.points[0]) // 2] if run.evaluation.points else []
    points = [
        drawn(f"points-{place}", f"Predicted over true: {name}", partial(_points, run, place), NOTHING)
        for place, name in enumerate(outputs)
    ]
    return [
        *named[:first],
        *compared("loss", "Loss", "loss"),
        *(compared("error", "Top-1 error", "top1", ", %") if run.task == "classification" else []),
        *named[first:],
        drawn("learning-rate", "Learning rate over updates", partial(_learning_rate, run), NOTHING),
        drawn("speed", "Speed and data wait over time", partial(_speed, run), NOTHING),
        *points,
        *([drawn("calibration", "Calibration", partial(_calibration, run), NOTHING)] if error is not None else []),
    ]


def data_wait_shares(run: Run) -> np.ndarray:
    """The share of the training time between two training lines that was spent waiting for data [lines].

    The training time of a line is its images divided by its images per second, which leaves evaluation out.
    """
    train, batch = run.metrics.train, run.setting("batch")
    images = np.diff(column(train, "step"), prepend=0) * (batch if isinstance(batch, int) else np.nan)
    images[images <= 0] = np.nan
    return np.asarray(np.clip(column(train, "data_wait_s") * column(train, "images_per_s") / images, 0, 1))


class _Scale:
    """The x axis of a run's plots, over updates or time: from 0 to `end`, not finite where there is nothing."""

    def __init__(self, run: Run, against: Against) -> None:
        lines = [*run.metrics.train, *run.metrics.test]
        self._key, self._size, self.unit = "step", 1.0, "updates"
        self.end = float(max((line.step for line in lines), default=0))
        if against == "time":
            times = column(lines, "time_s")
            last = float(np.nanmax(times)) if np.isfinite(times).any() else np.nan
            self._key, (self._size, self.unit) = "time_s", ax.time_unit(last)
            self.end = last / self._size

    def draw(self, axes: Axes, curve: PlotLine) -> None:
        curve.draw(axes, column(curve.lines, self._key) / self._size)
        ax.course_axis(axes, self.end, integer=self._key == "step")


def _compare(run: Run, curves: Sequence[PlotLine], against: Against, unit: str, title: str) -> Drawing:
    """Several curves that share a quantity."""
    curves, scale = [curve for curve in curves if not curve.is_empty], _Scale(run, against)
    if not curves or not np.isfinite(scale.end):
        return None
    axes = ax.panel(f"{title}{unit}", scale.unit, [curve.label for curve in curves])
    for curve in curves:
        scale.draw(axes, curve)
    ax.wide_axis(axes, np.concatenate([curve.y for curve in curves]))
    return " ".join(map(str, curves)), ax.with_legend(axes)


def _calibration(run: Run, title: str) -> Drawing:
    """A reliability diagram: how often answers of a probability are right."""
    bins = run.evaluation.calibration
    if not bins:
        return None
    axes = ax.panel("Right answers, %", "mean probability of the answer, %")
    axes.plot([0, 100], [0, 100], color=ax.MUTED, linewidth=0.8, linestyle="--")
    x, y = ([100 * getattr(part, key) for part in bins] for key in ("confidence", "accuracy"))
    axes.plot(x, y, color=ax.TEST, marker="o", linewidth=1.4, clip_on=False)
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 104)
    error = units.percent(run.evaluation.calibration_error)
    rows = "; ".join(f"{a:.0f} % probable: {b:.0f} % right" for a, b in zip(x, y, strict=True))
    return f"Expected calibration error {error}. {rows}.", axes


def _points(run: Run, place: int, title: str) -> Drawing:
    """What a regression says of the test split, over what is true, of the output at a place."""
    points = np.array(run.evaluation.points, dtype=np.float64)[:, 2 * place : 2 * place + 2]
    axes = ax.panel(title, f"true {run.evaluation.classes[place]}")
    ends = [np.nanmin(points), np.nanmax(points)]
    axes.plot(ends, ends, color=ax.MUTED, linewidth=0.8)
    axes.plot(points[:, 0], points[:, 1], "o", color=ax.TEST, markersize=3, alpha=0.5)
    return f"{len(points)} test images; on the line the answer is right.", axes


def _learning_rate(run: Run, title: str) -> Drawing:
    curve = PlotLine("learning rate", run.metrics.train, column(run.metrics.train, "lr"), ax.TRAIN)
    if curve.is_empty:
        return None
    axes = ax.panel(title, "updates")
    _Scale(run, "updates").draw(axes, curve)
    rates = curve.y[np.isfinite(curve.y) & (curve.y > 0)]
    falls_by_factors = len(rates) > 2 and rates[-1] < 0.02 * rates.max() and np.mean(np.diff(rates) == 0) > 0.5
    (ax.wide_axis if falls_by_factors else ax.linear_axis)(axes, curve.y)
    return str(curve), axes


def _speed(run: Run, title: str) -> Drawing:
    """Two axes over each other on one time scale, because a dip of the one is explained by a peak of the other."""
    train, scale = run.metrics.train, _Scale(run, "time")
    images = PlotLine("images per second", train, column(train, "images_per_s"), ax.TRAIN)
    waits = PlotLine("waiting for data, % of training time", train, 100 * data_wait_shares(run), ax.TRAIN)
    if images.is_empty or not np.isfinite(scale.end):
        return None
    upper = ax.panel("Images per second over time", height=74, below=ax.UNDER + 68)
    lower = ax.under(upper, "Waiting for data, % of training time", scale.unit, 68)
    scale.draw(upper, images)
    scale.draw(lower, waits)
    ax.linear_axis(upper, images.y, ticks=3)
    ax.linear_axis(lower, waits.y, ticks=3, at_least=10, at_most=100)
    return " ".join(str(curve) for curve in (images, waits) if not curve.is_empty), upper
