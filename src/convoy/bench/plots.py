"""The pictures of a study: speed-up over devices, parts of an update, predictions, and curves of the test error.

Those are over time and over updates, where they coincide (Yadan et al., 2013, Figure 1).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from convoy import units
from convoy.bench.records import COMMUNICATION, COMPUTE, CONVOY, INPUT, OPTIMIZER, TORCH, short
from convoy.bench.results import Convergence, ErrorCurve, Results, StudyRow
from convoy.bench.table import signed
from convoy.report import axes as ax
from convoy.report.pages import Panel
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
LEGEND, PLOT = 15, 170  # in points: height of a line of a legend, and of a plot
_ROW, _SIDE = 31, 8  # in points: height of a row, and the margin left of rows
_HANDLE = 1.4  # width of a handle in a legend, in sizes of its font


def panels(results: Results) -> list[Panel]:
    """All pictures, in the order of the report."""
    with ax.house_style():
        return [_speedups(results), _parts(results), _predictions(results)]


def _series(results: Results) -> dict[str, list[StudyRow]]:
    """Rows that differ by their devices only, by name; each begins at one device, if that was measured."""
    several = [row for row in results.rows if row.devices > 1]
    one = results.reference
    lines = {}
    for series in dict.fromkeys(row.series for row in several):
        rows = sorted((row for row in several if row.series == series), key=lambda row: row.devices)
        alone = [row for row in results.rows if row.devices == 1 and (row.kind == CONVOY) == (rows[0].kind == CONVOY)]
        first = alone[:1] or ([one] if one is not None and one.devices == 1 else [])
        lines[series] = [*first, *rows]
    return {SHORT.get(name, short(name) if "\n" not in name else "plan"): rows for name, rows in lines.items()}


def _speedups(results: Results) -> Panel:
    """Images per second over those of the reference, against the devices."""
    name, title = "speed-up", "Speed-up over devices"
    lines = _series(results)
    if not lines:
        return Panel(name, title, "Nothing has been measured on several devices yet.", None)
    every = [row for rows in lines.values() for row in rows]
    ideals = {row.devices: row.ideal for row in sorted(every, key=lambda row: row.devices)}
    columns, above = legend_room(["ideal", *lines], 3)
    figure, axes = _panel(title, "devices", PLOT, above)
    axes.plot(list(ideals), list(ideals.values()), color=ax.MUTED, linestyle=DASHES[2], label="ideal")
    smallest, largest = min(ideals), max(ideals)
    for place, (label, rows) in enumerate(lines.items()):
        # spreads stand aside, so that those of several series do not lie on each other
        aside = 0.02 * largest * (place - (len(lines) - 1) / 2) / max(1, len(lines) - 1)
        spread = [row.speedup_spread or 0.0 for row in rows]
        axes.errorbar(
            [row.devices + (aside if row.devices > 1 else 0) for row in rows],
            [row.speedup for row in rows],
            yerr=([min(row.speedup, width) for row, width in zip(rows, spread, strict=True)], spread),
            color=COLORS[place % len(COLORS)],
            marker=MARKERS[place % len(MARKERS)],
            linestyle=DASHES[place // len(COLORS) % len(DASHES)],
            linewidth=1.5,
            elinewidth=1,
            capsize=3,
            markersize=5,
            label=label,
            clip_on=False,
        )
    axes.set_ylim(0, 1.05 * max(*ideals.values(), *(row.speedup + (row.speedup_spread or 0) for row in every)))
    axes.set_xlim(smallest - 0.04 * largest, 1.04 * largest)
    ax.set_ticks(axes.yaxis, 6)
    axes.xaxis.set_major_locator(FixedLocator(list(ideals)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.tick(value)))
    legend_above(axes, *axes.get_legend_handles_labels(), columns=columns, left=ax.LEFT)
    several = ((label, row) for label, rows in lines.items() for row in rows if row.devices > 1)
    sentences = (f"{label}: {row.speedup:.2f} on {row.devices}." for label, row in several)
    return Panel(name, title, " ".join(sentences), figure)


def _parts(results: Results) -> Panel:
    name, title = "parts", "Where an update's time goes"
    if not results.rows:
        return Panel(name, title, "Nothing has been measured yet.", None)
    longest = max(row.seconds for row in results.rows)

    def draw(axes: Axes, row: StudyRow, level: float) -> None:
        start = 0.0
        for part, (_, color) in PARTS.items():
            axes.barh(level, row.parts[part], left=start, height=0.36, color=color, edgecolor=ax.PAPER, linewidth=0.6)
            start += row.parts[part]

    figure, axes = _rows_figure(title, results.rows, longest, lambda row: time_of(row.seconds), draw)
    legend_above(
        axes,
        [axes.barh(-9, 0, color=color) for _, color in PARTS.values()],
        [word for word, _ in PARTS.values()],
    )
    sentences = (
        f"{name_of(row)}: {', '.join(f'{word} {time_of(row.parts[part])}' for part, (word, _) in PARTS.items())}."
        for row in results.rows
    )
    return Panel(name, title, " ".join(sentences), figure)


def _predictions(results: Results) -> Panel:
    """Predicted and measured time of an update, with its spread, for each row that has a prediction."""
    name, title = "predictions", "Predicted and measured"
    rows = [row for row in results.rows if row.predicted is not None]
    if not rows:
        return Panel(name, title, "Nothing was predicted.", None)
    longest = max(max(row.seconds + (row.spread or 0), row.predicted or 0) for row in rows)

    def draw(axes: Axes, row: StudyRow, level: float) -> None:
        axes.plot([row.seconds, row.predicted or 0], [level, level], color=ax.MUTED, linewidth=1)
        _measured(axes, row.seconds, level, row.spread or 0)
        _predicted(axes, row.predicted or 0, level)

    figure, axes = _rows_figure(title, rows, longest, lambda row: signed(row.error), draw)
    legend_above(axes, [_measured(axes, -1, -9, 0), _predicted(axes, -1, -9)], ["measured, ± spread", "predicted"])
    sentences = (
        f"{name_of(row)}: predicted {time_of(row.predicted or 0)}, measured {time_of(row.seconds)}." for row in rows
    )
    return Panel(name, title, " ".join(sentences), figure)


def _measured(axes: Axes, seconds: float, level: float, spread: float) -> ErrorbarContainer:
    style = {"color": ax.TRAIN, "marker": "o", "markersize": 6, "capsize": 3, "elinewidth": 1}
    return axes.errorbar([seconds], [level], xerr=[spread], **style)  # type: ignore[arg-type]


def _predicted(axes: Axes, seconds: float, level: float) -> Line2D:
    style = {"color": ax.TEST, "marker": "D", "markersize": 6, "markerfacecolor": "none", "markeredgewidth": 1.5}
    return axes.plot([seconds], [level], linestyle="none", **style)[0]  # type: ignore[arg-type]


def _rows_figure(
    title: str,
    rows: Sequence[StudyRow],
    longest: float,
    note: Callable[[StudyRow], str],
    draw: Callable[[Axes, StudyRow, float], None],
) -> tuple[Figure, Axes]:
    """A panel with a line for each row, its name above what is drawn, on one axis of milliseconds or seconds."""
    unit, factor = ("s", 1.0) if longest >= 2 else ("ms", 1e3)
    figure, axes = _panel(title, f"{unit} an update", _ROW * len(rows), ax.TOP + LEGEND, left=_SIDE, grid="x")
    axes.set_xlim(0, 1.02 * longest)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.yaxis.set_major_locator(NullLocator())
    ax.set_ticks(axes.xaxis, 6, factor=factor)
    for level, row in enumerate(rows):
        axes.text(0, level - 0.14, name_of(row), va="bottom", ha="left", size=10.5)
        axes.text(1.02 * longest, level - 0.14, note(row), va="bottom", ha="right", size=10.5, color=ax.MUTED)
        draw(axes, row, level + 0.16)
    return figure, axes


def _panel(title: str, xlabel: str, height: float, above: float, **options: Any) -> tuple[Figure, Axes]:
    """A panel with axes of a height in points, `above` points under its upper edge."""
    figure = ax.new_figure(above + height + ax.BOTTOM)
    return figure, ax.add_axes(figure, title, xlabel, above=above, **options)


def legend_room(words: Sequence[str], most: int) -> tuple[int, float]:
    """How many columns of a legend fit beside each other, `most` at most, and the margin above the axes for it."""
    with ax.house_style():
        size = FontProperties().get_size_in_points()
        handle, gap = size * (_HANDLE + ax.LEGEND["handletextpad"]), size * ax.LEGEND["columnspacing"]
        widths = [handle + TextPath((0, 0), word).get_extents().width for word in words]
    columns = next(
        number
        for number in range(most, 0, -1)
        if number == 1
        or sum(max(column, default=0) for column in np.array_split(widths, number)) + gap * (number - 1)
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
        handlelength=_HANDLE,
        **ax.LEGEND,
    )


def name_of(row: StudyRow | ErrorCurve) -> str:
    """A row or its curve in a picture: short, with its devices."""
    devices = "" if row.devices == 1 or "=" in row.label else f", {row.devices} devices"
    return f"{units.shorten(row.name, 38)}{devices}"


_COLORS = tuple(color for color in COLORS if color != ax.INK)  # which the reference has
_STRIP, _GAP = 52, 40  # in points: height of the strip of distances, and what lies between it and the curves


def convergence_panels(convergence: Convergence) -> list[Panel]:
    """Test error over time and over updates."""
    names = {"error-time": "Test error over time", "error-updates": "Test error over updates"}
    if not convergence.curves or convergence.reference is None:
        return [Panel(name, title, "No configuration has been evaluated yet.", None) for name, title in names.items()]
    with ax.house_style():
        drawn = (_over_time(convergence), _over_updates(convergence, convergence.reference))
        return [Panel(*one, *text_and_figure) for one, text_and_figure in zip(names.items(), drawn, strict=True)]


def _over_time(convergence: Convergence) -> tuple[str, Figure]:
    last = max(curve.seconds[-1] for curve in convergence.curves)
    size, unit = ax.time_unit(last)
    times = [[second / size for second in curve.seconds] for curve in convergence.curves]
    look = {"color": ax.INK, "linewidth": 1.6}
    figure, axes = _curves(convergence, "Test error over time, %", f"{unit} of training", times, look)
    ax.time_axis(axes, last / size)
    sentences = (
        f"{name_of(curve)}: {units.significant(100 * curve.errors[-1])}{units.SPACE}% after "
        f"{units.duration(curve.seconds[-1])}."
        for curve in convergence.curves
    )
    return " ".join(sentences), figure


def _over_updates(convergence: Convergence, reference: ErrorCurve) -> tuple[str, Figure]:
    """The curves, and under them how far each is from the serial one.

    The reference is a wide pale line, so that it is seen with those that lie on it.
    """
    steps, look = [curve.steps for curve in convergence.curves], {"color": ax.MUTED, "alpha": 0.45, "linewidth": 6}
    figure, axes = _curves(convergence, "Test error over updates, %", "", steps, look, below=_GAP + _STRIP)
    whole, place = figure.get_figheight() * 72, axes.get_position()
    strip = figure.add_axes((place.x0, ax.BOTTOM / whole, place.width, _STRIP / whole))
    _draw_distances(strip, convergence, reference)
    for one in (axes, strip):
        ax.count_axis(one, max(curve.steps[-1] for curve in convergence.curves))
    axes.tick_params(labelbottom=False)
    strip.set_xlabel("updates", labelpad=4)
    heading = f"Distance from {name_of(reference)}, percentage points"
    figure.text(2 / ax.WIDTH, (ax.BOTTOM + _STRIP + 11) / whole, heading, size=10.5)
    sentences = (
        f"{name_of(curve)}: at most {units.significant(100 * distance.error)} points from {name_of(reference)}."
        for curve, distance in convergence.compared
    )
    return " ".join(sentences), figure


def _curves(
    convergence: Convergence,
    title: str,
    xlabel: str,
    places: Sequence[Sequence[float]],
    reference: Mapping[str, Any],
    below: float = 0,
) -> tuple[Figure, Axes]:
    """A panel of all curves over `places`, the x values of each one's evaluations; `below` points stay free under
    it."""
    columns, above = legend_room([name_of(curve) for curve in convergence.curves], 2)
    figure = ax.new_figure(above + PLOT + below + ax.BOTTOM)
    axes = ax.add_axes(figure, title, xlabel, above=above, height=PLOT)
    for number, (curve, x) in enumerate(zip(convergence.curves, places, strict=True)):
        is_reference = curve.distance is None and len(convergence.curves) > 1
        look = reference if is_reference else _look(convergence, number, len(x))
        axes.plot(x, [100 * error for error in curve.errors], label=name_of(curve), clip_on=False, **look)
    ax.wide_axis(axes, np.array([100 * error for curve in convergence.curves for error in curve.errors]))
    legend_above(axes, *axes.get_legend_handles_labels(), columns=columns, left=ax.LEFT)
    return figure, axes


def _look(convergence: Convergence, number: int, points: int) -> dict[str, Any]:
    """Color, line and marks of a curve; no two have their marks at the same evaluations, where there are enough."""
    place = number - sum(curve.distance is None for curve in convergence.curves[:number])
    interval = min(len(convergence.compared), max(1, points // 3)) or 1
    return {
        "color": _COLORS[place % len(_COLORS)],
        "linestyle": DASHES[place // len(_COLORS) % len(DASHES)],
        "marker": MARKERS[place % len(MARKERS)],
        "markevery": (place % interval, interval),
        "markersize": 4.5,
        "linewidth": 1.2,
    }


def _draw_distances(axes: Axes, convergence: Convergence, reference: ErrorCurve) -> None:
    ax.quiet(axes)
    axes.grid(visible=True, axis="y")
    axes.spines["bottom"].set_visible(False)
    axes.axhline(0, color=ax.MUTED, alpha=0.45, linewidth=4)
    serial = dict(zip(reference.steps, reference.errors, strict=True))
    for number, curve in enumerate(convergence.curves):
        if curve.distance is not None:
            both = zip(curve.steps, curve.errors, strict=True)
            distances = {step: 100 * (error - serial[step]) for step, error in both if step in serial}
            axes.plot(
                list(distances), list(distances.values()), clip_on=False, **_look(convergence, number, len(distances))
            )
    largest = 100 * max((distance.error for _, distance in convergence.compared), default=0.0)
    axes.set_ylim(-1.15 * largest or -1, 1.15 * largest or 1)
    ax.set_ticks(axes.yaxis, 3, None, symmetric=True)
