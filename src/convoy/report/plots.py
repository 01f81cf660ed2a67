"""The curves of a run as matplotlib figures: loss and error over updates and over time, learning rate, speed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from convoy import units
from convoy.report import axes as ax
from convoy.report.pages import Panel
from convoy.report.run_directory import Run, column, read_run
from convoy.training.records import MetricsLine

Against = Literal["updates", "time"]
DASHED = (0.0, (5.0, 2.0))


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


def draw_curves(run: Path) -> dict[str, Figure]:
    """The plots of a run directory by name, ready for `figure.savefig("curve.svg")` or `.png`.

    Names: loss-updates, loss-time, error-updates, error-time, learning-rate, speed. A plot without any value is left
    out. Raises ConvoyError if the directory is no run or a file in it is corrupt.
    """
    return {panel.name: panel.figure for panel in draw_panels(read_run(run)) if panel.figure is not None}


def draw_panels(run: Run) -> list[Panel]:
    """The plots of a run in the order of the report, with title and description."""
    train, test = run.metrics.train, run.metrics.test
    tested = "test, averaged weights" if run.setting("ema.decay") else "test"
    loss = [
        PlotLine("train", train, column(train, "loss"), ax.TRAIN, width=1.1),
        PlotLine(tested, test, column(test, "loss"), ax.TEST, DASHED, "o"),
    ]
    error = [
        PlotLine("train", train, 100 * (1 - column(train, "top1")), ax.TRAIN, width=1.1),
        PlotLine(tested, test, 100 * (1 - column(test, "top1")), ax.TEST, DASHED, "o"),
    ]
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


def _compare(run: Run, name: str, title: str, curves: list[PlotLine], against: Against) -> Panel:
    """A panel of several curves that share a quantity."""
    name, title = f"{name}-{against}", f"{title} over {against}"
    curves = [curve for curve in curves if np.isfinite(curve.y).any()]
    if not curves or not np.isfinite(_end(run, against)):
        return Panel(name, title, "Nothing has been recorded yet.", None)
    figure = ax.new_figure()
    axes = ax.add_axes(figure, f"{title}, %" if name.startswith("error") else title, _unit(run, against))
    for curve in curves:
        _draw(axes, run, curve, against)
    ax.wide_axis(axes, np.concatenate([curve.y for curve in curves]))
    _finish(axes, run, against)
    ax.legend(axes)
    return Panel(name, title, " ".join(_describe(curve) for curve in curves), figure)


def _learning_rate(run: Run) -> Panel:
    curve = PlotLine("learning rate", run.metrics.train, column(run.metrics.train, "lr"), ax.TRAIN)
    name, title = "learning-rate", "Learning rate over updates"
    if not np.isfinite(curve.y).any():
        return Panel(name, title, "Nothing has been recorded yet.", None)
    figure = ax.new_figure()
    axes = ax.add_axes(figure, title, "updates", above=ax.TITLE)
    _draw(axes, run, curve, "updates")
    if _falls_by_factors(curve.y):
        ax.wide_axis(axes, curve.y)
    else:
        ax.linear_axis(axes, curve.y)
    _finish(axes, run, "updates")
    return Panel(name, title, _describe(curve), figure)


def _falls_by_factors(rates: np.ndarray) -> bool:
    known = rates[np.isfinite(rates) & (rates > 0)]
    return len(known) > 2 and known[-1] < 0.02 * known.max() and bool(np.mean(np.diff(known) == 0) > 0.5)


def _speed(run: Run) -> Panel:
    """Two axes over each other on one time scale, because a dip of the one is explained by a peak of the other."""
    train = run.metrics.train
    images = PlotLine("images per second", train, column(train, "images_per_s"), ax.TRAIN)
    waits = PlotLine("waiting for data, % of training time", train, 100 * data_wait_shares(run), ax.TRAIN)
    name, title = "speed", "Speed and data wait over time"
    if not np.isfinite(images.y).any() or not np.isfinite(_end(run, "time")):
        return Panel(name, title, "Nothing has been recorded yet.", None)
    figure = ax.new_figure()
    upper = ax.add_axes(figure, "Images per second over time", above=ax.TITLE, height=74)
    lower = ax.add_axes(figure, "Waiting for data, % of training time", _unit(run, "time"), top=116, above=ax.TITLE)
    for axes, curve in ((upper, images), (lower, waits)):
        _draw(axes, run, curve, "time")
        _finish(axes, run, "time")
    ax.linear_axis(upper, images.y, ticks=3)
    ax.linear_axis(lower, waits.y, ticks=3, at_least=10, at_most=100)
    upper.tick_params(labelbottom=False)
    described = [_describe(curve) for curve in (images, waits) if np.isfinite(curve.y).any()]
    return Panel(name, title, " ".join(described), figure)


def _draw(axes: Axes, run: Run, curve: PlotLine, against: Against) -> None:
    ax.draw(
        axes,
        _places(run, curve.lines, against),
        curve.y,
        color=curve.color,
        label=curve.label,
        style=curve.style,
        marker=curve.marker,
        width=curve.width,
    )


def _finish(axes: Axes, run: Run, against: Against) -> None:
    end = _end(run, against)
    if against == "time":
        ax.time_axis(axes, end)
    else:
        ax.count_axis(axes, end)


def _unit(run: Run, against: Against) -> str:
    return ax.time_unit(_seconds(run))[1] if against == "time" else "updates"


def _places(run: Run, lines: list[MetricsLine], against: Against) -> np.ndarray:
    if against == "updates":
        return column(lines, "step")
    return column(lines, "time_s") / ax.time_unit(_seconds(run))[0]


def _seconds(run: Run) -> float:
    times = column([*run.metrics.train, *run.metrics.test], "time_s")
    return float(np.nanmax(times)) if np.isfinite(times).any() else np.nan


def _end(run: Run, against: Against) -> float:
    if against == "time":
        return _seconds(run) / ax.time_unit(_seconds(run))[0]
    return float(max((line.step for line in (*run.metrics.train, *run.metrics.test)), default=0))


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
