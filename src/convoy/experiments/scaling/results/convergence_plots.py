"""The pictures of Yadan et al. (2013), Figure 1: test error over time; and over updates, where the curves coincide."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from convoy.experiments import axes as ax
from convoy.experiments import formats
from convoy.experiments.plots import Panel
from convoy.experiments.scaling.results.curves import Convergence
from convoy.experiments.scaling.results.plots import (
    COLOURS,
    DASHES,
    MARKERS,
    PLOT,
    legend_above,
    legend_room,
    name_of,
    panel_axes,
)

_COLOURS = tuple(colour for colour in COLOURS if colour != ax.INK)  # which the reference has
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
        f"{name_of(curve)}: {_percent(curve.errors[-1])} after {formats.duration(curve.seconds[-1])}."
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
        f"{name_of(curve)}: at most {formats.significant(100 * curve.distance.error)} points from {_of(found)}."
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
    """Colour, line and marks of a curve; no two have their marks at the same evaluations, where there are enough."""
    place = number - sum(curve.distance is None for curve in found.curves[:number])
    apart = min(len(found.others), max(1, points // 3)) or 1
    return {
        "color": _COLOURS[place % len(_COLOURS)],
        "linestyle": DASHES[place // len(_COLOURS) % len(DASHES)],
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
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: formats.tick(round(value, 9))))


def _error_axis(axes: Axes, found: Convergence) -> None:
    ax.wide_axis(axes, np.array([100 * error for curve in found.curves for error in curve.errors]))


def _of(found: Convergence) -> str:
    assert found.reference is not None
    return name_of(found.reference)


def _percent(share: float) -> str:
    return f"{formats.significant(100 * share)}{formats.SPACE}%"
