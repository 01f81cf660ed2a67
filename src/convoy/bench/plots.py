"""The pictures of a study: speed-up over devices, parts of an update, predictions, and curves of the test error.

Those are over time and over updates, where they coincide (Yadan et al., 2013, Figure 1).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from convoy import units
from convoy.bench.configuration import CONVOY, TORCH, short
from convoy.bench.curves import Convergence, ErrorCurve
from convoy.bench.measurement import COMMUNICATION, COMPUTE, INPUT, OPTIMIZER
from convoy.bench.results import Results, StudyRow
from convoy.bench.table import signed
from convoy.report import axes as ax
from convoy.report.plots import Panel
from convoy.units import seconds as time_of

COLORS = (ax.TRAIN, ax.TEST, ax.GREEN, ax.PURPLE, ax.OCHRE, ax.INK)
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
DASHES: tuple[str | tuple[float, tuple[float, ...]], ...] = ("-", (0.0, (5.0, 2.0)), (0.0, (1.5, 1.5)))
PARTS = {
    COMPUTE: ("computing", ax.TRAIN),
    COMMUNICATION: ("exposed communication", ax.TEST),
    INPUT: ("input", ax.OCHRE),
    OPTIMIZER: ("optimizer", ax.GREEN),
}
SHORT = {"ddp": "DDP", "fabric": "Fabric", "accelerate": "accelerate", TORCH: "PyTorch"}
LEGEND, PLOT = 15, 170
"""In points: height of a line of a legend, and of a plot."""
_ROW, _SIDE = 31, 8
"""In points: height of a row, and the margin left of rows."""
_HANDLE, _PAD, _APART = 1.4, 0.6, 1.6
"""In a legend, in sizes of its font: width of a handle, what lies between it and its word, and between columns."""


@dataclass(frozen=True)
class Series:
    """Rows that differ by their devices only."""

    name: str
    rows: tuple[StudyRow, ...]


def panels(found: Results) -> list[Panel]:
    """All pictures, in the order of the report."""
    with ax.house_style():
        return [speedups(found), parts(found), predictions(found)]


def series_of(found: Results) -> list[Series]:
    """The lines of the speed-up: each begins at one device, if that was measured."""
    names = dict.fromkeys(row.series for row in found.rows if row.devices > 1)
    one = found.reference
    lines = []
    for name in names:
        rows = sorted(
            (row for row in found.rows if row.series == name and row.devices > 1), key=lambda row: row.devices
        )
        alone = [row for row in found.rows if row.devices == 1 and (row.kind == CONVOY) == (rows[0].kind == CONVOY)]
        first = alone[:1] or ([one] if one is not None and one.devices == 1 else [])
        lines.append(Series(SHORT.get(name, short(name) if "\n" not in name else "plan"), (*first, *rows)))
    return lines


def speedups(found: Results) -> Panel:
    """Images per second over those of the reference, against the devices."""
    name, title = "speed-up", "Speed-up over devices"
    lines = series_of(found)
    if not lines:
        return Panel(name, title, "Nothing has been measured on several devices yet.", None)
    numbers = sorted({row.devices for line in lines for row in line.rows})
    columns, above = legend_room(["ideal", *(line.name for line in lines)], 3)
    figure, axes = panel_axes(title, "devices", PLOT, above, ax.LEFT)
    axes.grid(axis="y")
    largest = numbers[-1]
    ideals = {row.devices: row.ideal for line in lines for row in line.rows}
    axes.plot(numbers, [ideals[number] for number in numbers], color=ax.MUTED, linestyle=DASHES[2], label="ideal")
    for place, line in enumerate(lines):
        _line(axes, line, place, 0.02 * largest * (place - (len(lines) - 1) / 2) / max(1, len(lines) - 1))
    top = max(*ideals.values(), *(row.speedup + (row.speedup_spread or 0) for line in lines for row in line.rows))
    axes.set_ylim(0, 1.05 * top)
    axes.set_xlim(numbers[0] - 0.04 * largest, 1.04 * largest)
    axes.xaxis.set_major_locator(FixedLocator(numbers))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.tick(value)))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.tick(value)))
    legend_above(axes, *axes.get_legend_handles_labels(), columns=columns, left=ax.LEFT)
    said = [
        f"{line.name}: {row.speedup:.2f} on {row.devices}." for line in lines for row in line.rows if row.devices > 1
    ]
    return Panel(name, title, " ".join(said), figure)


def _line(axes: Axes, line: Series, place: int, aside: float) -> None:
    """A series; its spreads stand `aside`, so that those of several series do not lie on each other."""
    spread = [row.speedup_spread or 0.0 for row in line.rows]
    axes.errorbar(
        [row.devices + (aside if row.devices > 1 else 0) for row in line.rows],
        [row.speedup for row in line.rows],
        yerr=([min(row.speedup, width) for row, width in zip(line.rows, spread, strict=True)], spread),
        color=COLORS[place % len(COLORS)],
        marker=MARKERS[place % len(MARKERS)],
        linestyle=DASHES[place // len(COLORS) % len(DASHES)],
        linewidth=1.5,
        elinewidth=1,
        capsize=3,
        markersize=5,
        label=line.name,
        clip_on=False,
    )


def parts(found: Results) -> Panel:
    """A bar for each row: what an update's time goes to."""
    name, title = "parts", "Where an update's time goes"
    if not found.rows:
        return Panel(name, title, "Nothing has been measured yet.", None)
    longest = max(row.seconds for row in found.rows)

    def draw(axes: Axes, row: StudyRow, level: float) -> None:
        start = 0.0
        for part, (_, color) in PARTS.items():
            axes.barh(level, row.parts[part], left=start, height=0.36, color=color, edgecolor=ax.PAPER, linewidth=0.6)
            start += row.parts[part]

    figure, axes = _rows_figure(title, found.rows, longest, lambda row: time_of(row.seconds), draw)
    handles = [axes.barh(-9, 0, color=color) for _, color in PARTS.values()]
    legend_above(axes, handles, [word for word, _ in PARTS.values()])
    said = (
        f"{name_of(row)}: {', '.join(f'{word} {time_of(row.parts[part])}' for part, (word, _) in PARTS.items())}."
        for row in found.rows
    )
    return Panel(name, title, " ".join(said), figure)


def predictions(found: Results) -> Panel:
    """For each row that was predicted: what was predicted, what was measured, and the spread of that."""
    name, title = "predictions", "Predicted and measured"
    rows = [row for row in found.rows if row.predicted is not None]
    if not rows:
        return Panel(name, title, "Nothing was predicted.", None)
    longest = max(max(row.seconds + (row.spread or 0), row.predicted or 0) for row in rows)

    def draw(axes: Axes, row: StudyRow, level: float) -> None:
        assert row.predicted is not None
        axes.plot([row.seconds, row.predicted], [level, level], color=ax.MUTED, linewidth=1)
        axes.errorbar(
            row.seconds, level, xerr=row.spread or 0, color=ax.TRAIN, marker="o", markersize=6, capsize=3, elinewidth=1
        )
        axes.plot(
            row.predicted, level, color=ax.TEST, marker="D", markersize=6, markerfacecolor="none", markeredgewidth=1.5
        )

    figure, axes = _rows_figure(title, rows, longest, lambda row: signed(row.error), draw)
    measured = axes.errorbar([-1], [-9], xerr=[0], color=ax.TRAIN, marker="o", markersize=6, capsize=3, elinewidth=1)
    predicted = axes.plot([-1], [-9], color=ax.TEST, marker="D", markerfacecolor="none", linestyle="none")[0]
    legend_above(axes, [measured, predicted], ["measured, ± spread", "predicted"])
    said = (
        f"{name_of(row)}: predicted {time_of(row.predicted or 0)}, measured {time_of(row.seconds)}." for row in rows
    )
    return Panel(name, title, " ".join(said), figure)


def _rows_figure(
    title: str,
    rows: Sequence[StudyRow],
    longest: float,
    note: Callable[[StudyRow], str],
    draw: Callable[[Axes, StudyRow, float], None],
) -> tuple[Figure, Axes]:
    """A panel with a line for each row, its name above what is drawn, on one axis of milliseconds or seconds."""
    unit, factor = ("s", 1.0) if longest >= 2 else ("ms", 1e3)
    figure, axes = panel_axes(title, f"{unit} an update", _ROW * len(rows), ax.TOP + LEGEND, _SIDE)
    axes.set_xlim(0, 1.02 * longest)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.yaxis.set_major_locator(NullLocator())
    axes.grid(axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.tick(round(value * factor, 6))))
    for level, row in enumerate(rows):
        axes.text(0, level - 0.14, name_of(row), va="bottom", ha="left", size=10.5)
        axes.text(1.02 * longest, level - 0.14, note(row), va="bottom", ha="right", size=10.5, color=ax.MUTED)
        draw(axes, row, level + 0.16)
    return figure, axes


def panel_axes(title: str, xlabel: str, height: float, above: float, left: float) -> tuple[Figure, Axes]:
    """A panel as wide as all, with axes of a height in points, `above` points under its upper edge."""
    whole = above + height + ax.BOTTOM
    figure = Figure(figsize=(ax.WIDTH / 72, whole / 72), dpi=144)
    axes = figure.add_axes(
        (left / ax.WIDTH, ax.BOTTOM / whole, (ax.WIDTH - left - ax.RIGHT) / ax.WIDTH, height / whole)
    )
    figure.text(2 / ax.WIDTH, 1 - 15 / whole, title, size=12, weight="bold")
    axes.tick_params(length=0, pad=6)
    axes.tick_params(axis="x", length=3, pad=4, width=0.8)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(xlabel, labelpad=4)
    return figure, axes


def legend_room(words: Sequence[str], most: int) -> tuple[int, float]:
    """How many columns of a legend fit beside each other, `most` at most, and the margin above the axes for it."""
    with ax.house_style():
        size = FontProperties().get_size_in_points()
        widths = [size * (_HANDLE + _PAD) + TextPath((0, 0), word).get_extents().width for word in words]
    columns = next(
        number
        for number in range(most, 0, -1)
        if number == 1
        or sum(max(column, default=0) for column in np.array_split(widths, number)) + size * _APART * (number - 1)
        <= ax.WIDTH - _SIDE
    )
    return columns, ax.TOP + LEGEND * (-(-len(words) // columns) - 1)


def legend_above(
    axes: Axes, handles: Sequence[object], words: Sequence[str], columns: int = 2, left: float = _SIDE
) -> None:
    """Between the title and the axes, which are `left` points from the edge."""
    height = axes.figure.get_figheight() * 72  # type: ignore[union-attr]
    bottom, top = axes.get_position().y0, axes.get_position().y1
    axes.legend(
        handles,  # type: ignore[call-overload]
        words,
        loc="upper left",
        bbox_to_anchor=((2 - left) / (ax.WIDTH - left - ax.RIGHT), (1 - 24 / height - bottom) / (top - bottom)),
        ncols=columns,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=_HANDLE,
        handletextpad=_PAD,
        columnspacing=_APART,
    )


def name_of(row: StudyRow | ErrorCurve) -> str:
    """A row or its curve in a picture: short, with its devices."""
    devices = "" if row.devices == 1 or "=" in row.label else f", {row.devices} devices"
    return f"{units.shorten(short(row.label), 38)}{devices}"


_COLORS = tuple(color for color in COLORS if color != ax.INK)  # which the reference has
_STRIP, _GAP = 52, 40
"""In points: height of the strip of distances, and what lies between it and the curves."""


def convergence_panels(found: Convergence) -> list[Panel]:
    """Test error over time and over updates."""
    with ax.house_style():
        return [_over_time(found), _over_updates(found)]


def _over_time(found: Convergence) -> Panel:
    name, title = "error-time", "Test error over time"
    if not found.curves:
        return Panel(name, title, "No configuration has been evaluated yet.", None)
    size, unit = ax.time_unit(max(curve.seconds[-1] for curve in found.curves))
    columns, above = legend_room([name_of(curve) for curve in found.curves], 2)
    figure, axes = panel_axes(f"{title}, %", f"{unit} of training", PLOT, above, ax.LEFT)
    axes.grid(axis="y")
    for place, curve in enumerate(found.curves):
        _draw(axes, found, place, [second / size for second in curve.seconds], wide=False)
    _error_axis(axes, found)
    ax.time_axis(axes, max(curve.seconds[-1] for curve in found.curves) / size)
    legend_above(axes, *axes.get_legend_handles_labels(), columns=columns, left=ax.LEFT)
    said = (
        f"{name_of(curve)}: {_percent(curve.errors[-1])} after {units.duration(curve.seconds[-1])}."
        for curve in found.curves
    )
    return Panel(name, title, " ".join(said), figure)


def _over_updates(found: Convergence) -> Panel:
    """The curves, and under them how far each is from the serial one."""
    name, title = "error-updates", "Test error over updates"
    if not found.curves:
        return Panel(name, title, "No configuration has been evaluated yet.", None)
    columns, above = legend_room([name_of(curve) for curve in found.curves], 2)
    figure, axes = panel_axes(f"{title}, %", "", PLOT + _GAP + _STRIP, above, ax.LEFT)
    place = axes.get_position()
    each = place.height / (PLOT + _GAP + _STRIP)
    axes.set_position((place.x0, place.y0 + (_GAP + _STRIP) * each, place.width, PLOT * each))
    strip = figure.add_axes((place.x0, place.y0, place.width, _STRIP * each))
    last = max(curve.steps[-1] for curve in found.curves)
    for number, curve in enumerate(found.curves):
        _draw(axes, found, number, curve.steps, wide=True)
    _error_axis(axes, found)
    _draw_distances(strip, found)
    for one in (axes, strip):
        one.grid(axis="y")
        ax.count_axis(one, last)
    axes.tick_params(labelbottom=False)
    strip.set_xlabel("updates", labelpad=4)
    whole = figure.get_figheight() * 72
    figure.text(
        2 / ax.WIDTH, place.y0 + (_STRIP + 11) / whole, f"Distance from {_of(found)}, percentage points", size=10.5
    )
    legend_above(axes, *axes.get_legend_handles_labels(), columns=columns, left=ax.LEFT)
    said = (
        f"{name_of(curve)}: at most {units.significant(100 * curve.distance.error)} points from {_of(found)}."
        for curve in found.others
        if curve.distance is not None
    )
    return Panel(name, title, " ".join(said), figure)


def _draw(axes: Axes, found: Convergence, number: int, places: Sequence[float], wide: bool) -> None:
    """A curve; where others lie on it the reference is a wide pale line, so that they are seen with it."""
    curve = found.curves[number]
    errors = [100 * error for error in curve.errors]
    if curve.distance is None and len(found.curves) > 1:
        look = {"color": ax.MUTED, "alpha": 0.45, "linewidth": 6} if wide else {"color": ax.INK, "linewidth": 1.6}
        axes.plot(places, errors, label=name_of(curve), clip_on=False, **look)  # type: ignore[arg-type]
        return
    axes.plot(places, errors, label=name_of(curve), clip_on=False, **_look(found, number, len(places)))  # type: ignore[arg-type]


def _look(found: Convergence, number: int, points: int) -> dict[str, object]:
    """Color, line and marks of a curve; no two have their marks at the same evaluations, where there are enough."""
    place = number - sum(curve.distance is None for curve in found.curves[:number])
    apart = min(len(found.others), max(1, points // 3)) or 1
    return {
        "color": _COLORS[place % len(_COLORS)],
        "linestyle": DASHES[place // len(_COLORS) % len(DASHES)],
        "marker": MARKERS[place % len(MARKERS)],
        "markevery": (place % apart, apart),
        "markersize": 4.5,
        "linewidth": 1.2,
    }


def _draw_distances(axes: Axes, found: Convergence) -> None:
    axes.tick_params(length=0, pad=6)
    axes.tick_params(axis="x", length=3, pad=4, width=0.8)
    axes.spines["left"].set_visible(False)
    axes.spines["bottom"].set_visible(False)
    assert found.reference is not None
    axes.axhline(0, color=ax.MUTED, alpha=0.45, linewidth=4)
    serial = dict(zip(found.reference.steps, found.reference.errors, strict=True))
    largest = 0.0
    for number, curve in enumerate(found.curves):
        both = [
            (step, 100 * (error - serial[step]))
            for step, error in zip(curve.steps, curve.errors, strict=True)
            if step in serial
        ]
        if curve.distance is None or not both:
            continue
        steps, apart = zip(*both, strict=True)
        largest = max(largest, float(np.abs(apart).max()))
        axes.plot(steps, apart, clip_on=False, **_look(found, number, len(steps)))  # type: ignore[arg-type]
    axes.set_ylim(-1.15 * largest or -1, 1.15 * largest or 1)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3, symmetric=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.tick(round(value, 9))))


def _error_axis(axes: Axes, found: Convergence) -> None:
    ax.wide_axis(axes, np.array([100 * error for curve in found.curves for error in curve.errors]))


def _of(found: Convergence) -> str:
    assert found.reference is not None
    return name_of(found.reference)


def _percent(share: float) -> str:
    return f"{units.significant(100 * share)}{units.SPACE}%"
