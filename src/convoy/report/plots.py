"""The curves of a run as matplotlib figures: loss and error over updates and over time, learning rate, speed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes

from convoy import units
from convoy.report import axes as ax
from convoy.report.pages import Panel
from convoy.report.run_directory import Run, column
from convoy.training.records import MetricsLine

Against = Literal["updates", "time"]
DASHED = (0.0, (5.0, 2.0))
NOTHING = "Nothing has been recorded yet."
_PLOT = 160  # height of the axes under a legend, in points


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
            axes.fill_between(x, low, high, color=self.color, alpha=0.22, linewidth=0)
        marker, size = self.marker if len(x) <= 60 else "", 3.4 if len(x) <= 25 else 2.4
        look: dict[str, Any] = {"linestyle": self.style, "linewidth": self.width, "marker": marker, "markersize": size}
        axes.plot(x, y, color=self.color, label=self.label, clip_on=False, **look)
        padded = np.concatenate(([np.nan], y, [np.nan]))
        dots = np.isfinite(y) & np.isnan(padded[:-2]) & np.isnan(padded[2:])
        if dots.any() and not marker:
            axes.plot(x[dots], y[dots], color=self.color, linestyle="none", marker="o", markersize=3.4, clip_on=False)


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
    train, test = run.metrics.train, run.metrics.test
    tested = "test, averaged weights" if run.setting("ema.decay") else "test"

    def curves(values: Callable[[list[MetricsLine]], np.ndarray]) -> list[PlotLine]:
        learnt = PlotLine("train", train, values(train), ax.TRAIN, width=1.1)
        return [learnt, PlotLine(tested, test, values(test), ax.TEST, DASHED, "o")]

    loss = curves(lambda lines: column(lines, "loss"))
    error = curves(lambda lines: 100 * (1 - column(lines, "top1")))
    with ax.house_style():
        return [
            _compare(run, "loss", "Loss", loss, "updates"),
            _compare(run, "loss", "Loss", loss, "time"),
            _compare(run, "error", "Top-1 error", error, "updates"),
            _compare(run, "error", "Top-1 error", error, "time"),
            _learning_rate(run),
            _speed(run),
        ]


def data_wait_shares(run: Run) -> np.ndarray:
    """The share of the training time between two training lines that was spent waiting for data [lines].

    The training time of a line is its images divided by its images per second, which leaves evaluation out. Without a
    batch in the configuration it is the time since the line before.
    """
    train = run.metrics.train
    waited = column(train, "data_wait_s")
    batch = run.setting("batch")
    with np.errstate(divide="ignore", invalid="ignore"):
        if isinstance(batch, int):
            seconds = np.diff(column(train, "step"), prepend=0) * batch / column(train, "images_per_s")
        else:
            seconds = np.diff(column(train, "time_s"), prepend=0)
        shares = waited / seconds
    shares[~np.isfinite(shares)] = np.nan
    return np.asarray(np.clip(shares, 0, 1))


@dataclass(frozen=True)
class _Scale:
    """An x axis: its values are `key` of a line by `size`; it goes from 0 to `end`."""

    key: str
    size: float
    unit: str
    end: float

    @staticmethod
    def of(run: Run, against: Against) -> "_Scale":
        every = [*run.metrics.train, *run.metrics.test]
        if against == "updates":
            return _Scale("step", 1, "updates", max((line.step for line in every), default=0))
        times = column(every, "time_s")
        seconds = float(np.nanmax(times)) if np.isfinite(times).any() else np.nan
        size, unit = ax.time_unit(seconds)
        return _Scale("time_s", size, unit, seconds / size)

    def draw(self, axes: Axes, curve: PlotLine) -> None:
        curve.draw(axes, column(curve.lines, self.key) / self.size)
        (ax.count_axis if self.key == "step" else ax.time_axis)(axes, self.end)


def _compare(run: Run, name: str, title: str, curves: list[PlotLine], against: Against) -> Panel:
    """A panel of several curves that share a quantity."""
    name, title, scale = f"{name}-{against}", f"{title} over {against}", _Scale.of(run, against)
    curves = [curve for curve in curves if np.isfinite(curve.y).any()]
    if not curves or not np.isfinite(scale.end):
        return Panel(name, title, NOTHING, None)
    words = [curve.label for curve in curves]
    axes = ax.panel(f"{title}, %" if name.startswith("error") else title, scale.unit, _PLOT, words)
    for curve in curves:
        scale.draw(axes, curve)
    ax.wide_axis(axes, np.concatenate([curve.y for curve in curves]))
    return Panel(name, title, " ".join(map(_describe, curves)), ax.with_legend(axes))


def _learning_rate(run: Run) -> Panel:
    curve = PlotLine("learning rate", run.metrics.train, column(run.metrics.train, "lr"), ax.TRAIN)
    name, title = "learning-rate", "Learning rate over updates"
    if not np.isfinite(curve.y).any():
        return Panel(name, title, NOTHING, None)
    figure = ax.new_figure()
    axes = ax.add_axes(figure, title, "updates", above=ax.TITLE)
    _Scale.of(run, "updates").draw(axes, curve)
    rates = curve.y[np.isfinite(curve.y) & (curve.y > 0)]
    falls_by_factors = len(rates) > 2 and rates[-1] < 0.02 * rates.max() and np.mean(np.diff(rates) == 0) > 0.5
    (ax.wide_axis if falls_by_factors else ax.linear_axis)(axes, curve.y)
    return Panel(name, title, _describe(curve), figure)


def _speed(run: Run) -> Panel:
    """Two axes over each other on one time scale, because a dip of the one is explained by a peak of the other."""
    train, scale = run.metrics.train, _Scale.of(run, "time")
    images = PlotLine("images per second", train, column(train, "images_per_s"), ax.TRAIN)
    waits = PlotLine("waiting for data, % of training time", train, 100 * data_wait_shares(run), ax.TRAIN)
    name, title = "speed", "Speed and data wait over time"
    if not np.isfinite(images.y).any() or not np.isfinite(scale.end):
        return Panel(name, title, NOTHING, None)
    figure = ax.new_figure()
    upper = ax.add_axes(figure, "Images per second over time", above=ax.TITLE, height=74)
    lower = ax.add_axes(figure, "Waiting for data, % of training time", scale.unit, top=116, above=ax.TITLE)
    scale.draw(upper, images)
    scale.draw(lower, waits)
    ax.linear_axis(upper, images.y, ticks=3)
    ax.linear_axis(lower, waits.y, ticks=3, at_least=10, at_most=100)
    upper.tick_params(labelbottom=False)
    described = [_describe(curve) for curve in (images, waits) if np.isfinite(curve.y).any()]
    return Panel(name, title, " ".join(described), figure)


def _describe(curve: PlotLine) -> str:
    finite = np.isfinite(curve.y)
    values, steps = curve.y[finite], column(curve.lines, "step")[finite]
    label = curve.label[0].upper() + curve.label[1:]
    if len(values) == 1:
        return f"{label}: {units.significant(values[0])} at update {units.count(int(steps[0]))}."
    lowest = int(values.argmin())
    return (
        f"{label}: from {units.significant(values[0])} to {units.significant(values[-1])}, lowest "
        f"{units.significant(values[lowest])} at update {units.count(int(steps[lowest]))}."
    )
