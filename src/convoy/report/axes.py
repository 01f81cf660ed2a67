"""The look of every plot: one size, fixed margins so that panels line up, few ticks, direct legends, named colors."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

from convoy import units

# Size of a panel in points: text of 10.5 points is read well when the panel is 320 to 560 pixels wide.
WIDTH, HEIGHT = 340, 252

# Margins of the axes in points; the one above holds the title and, under it, the legend.
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 54, 38

TITLE = 30  # the margin above axes without a legend
UNDER = TITLE + 12  # that above axes which stand under others

PAPER, INK, MUTED, GRID = "#ffffff", "#1b1f24", "#59636e", "#e4e7eb"
# Blue, vermilion and bluish green of Okabe and Ito (2008): told apart by color-blind readers too.
TRAIN, TEST, GREEN = "#0072b2", "#d55e00", "#009e73"

PURPLE, OCHRE = "#a8508a", "#b8860b"  # two more of theirs, darker, so that thin lines are seen on white

COLORS = (TRAIN, TEST, GREEN, PURPLE, OCHRE, INK)
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
DASHES: tuple[str | tuple[float, tuple[float, ...]], ...] = ("-", (0.0, (5.0, 2.0)), (0.0, (1.5, 1.5)))


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib's defaults and ours inside, whatever the user's matplotlibrc says; the user's again outside."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(
            {
                "font.size": 10.5,
                "axes.edgecolor": MUTED,
                "axes.facecolor": PAPER,
                "axes.labelcolor": MUTED,
                "axes.linewidth": 0.8,
                "axes.spines.right": False,
                "axes.spines.top": False,
                "axes.axisbelow": True,
                "figure.facecolor": PAPER,
                "grid.color": GRID,
                "grid.linewidth": 0.8,
                "lines.solid_capstyle": "round",
                "text.color": INK,
                "text.parse_math": False,
                "xtick.color": MUTED,
                "ytick.color": MUTED,
                "svg.fonttype": "none",
                "svg.hashsalt": "convoy",
            }
        )
        yield


def panel(
    title: str, xlabel: str = "", words: Sequence[str] = (), *, height: float = 0, below: float = 0, **options: Any
) -> Axes:
    """Axes in a panel of their own, with room above them for a legend of these words, if there are any.

    They are as high as those of other panels, or of a height in points; `below` points stay free under them.
    """
    above = TOP + _LINE * (-(-len(words) // columns(words)) - 1) if words else TITLE
    height = height or HEIGHT - BOTTOM - (TOP if words else TITLE)
    figure = Figure(figsize=(WIDTH / 72, (above + height + below + BOTTOM) / 72), dpi=144)
    return _add_axes(figure, title, xlabel, 0, above, height, **options)


def under(upper: Axes, title: str, xlabel: str, height: float) -> Axes:
    """Axes of a height in points on the same x axis, where a panel has left room `below` the upper ones."""
    figure = figure_of(upper)
    upper.tick_params(labelbottom=False)
    return _add_axes(figure, title, xlabel, figure.get_figheight() * 72 - BOTTOM - height - TITLE, TITLE, height)


def _add_axes(
    figure: Figure,
    title: str,
    xlabel: str,
    top: float,
    above: float,
    height: float,
    left: float = LEFT,
    grid: Literal["x", "y"] = "y",
) -> Axes:
    """Axes that begin `above` points under `top` (points from the edge of the panel), with their title at `top`: no
    line beside them, and marks below them alone."""
    whole = figure.get_figheight() * 72
    lower = whole - top - above - height
    axes = figure.add_axes((left / WIDTH, lower / whole, (WIDTH - left - RIGHT) / WIDTH, height / whole))
    figure.text(2 / WIDTH, 1 - (top + 15) / whole, title, size=12, weight="bold")
    axes.grid(visible=True, axis=grid)
    axes.set_xlabel(xlabel, labelpad=4)
    axes.tick_params(length=0, pad=6)
    axes.tick_params(axis="x", length=3, pad=4, width=0.8)
    axes.spines["left"].set_visible(False)
    return axes


def figure_of(axes: Axes) -> Figure:
    """The panel of some axes."""
    assert isinstance(axes.figure, Figure)
    return axes.figure


_LINE = 15  # height of a line of a legend, in points
# Distances in sizes of the font.
LEGEND: dict[str, Any] = {
    "frameon": False,
    "borderpad": 0,
    "borderaxespad": 0,
    "handlelength": 1.9,
    "handletextpad": 0.6,
    "columnspacing": 1.6,
}


def columns(words: Sequence[str]) -> int:
    """How many columns of a legend fit beside each other, three at most, and no more than its lines need."""
    size = 10.5
    handle, gap = size * (LEGEND["handlelength"] + LEGEND["handletextpad"]), size * LEGEND["columnspacing"]
    widths = [handle + TextPath((0, 0), word, size).get_extents().width for word in words]
    for number in (3, 2) if words else ():
        needed = sum(max(column, default=0) for column in np.array_split(widths, number)) + gap * (number - 1)
        if needed <= WIDTH - 8:
            return -(-len(words) // -(-len(words) // number))
    return 1


def with_legend(axes: Axes) -> Axes:
    """The axes, with the names of what is drawn between title and axes, where no curve can run under them."""
    figure = figure_of(axes)
    _, words = axes.get_legend_handles_labels()
    corner = 2 / WIDTH, 1 - 26 / (figure.get_figheight() * 72)
    place: dict[str, Any] = {"bbox_to_anchor": corner, "bbox_transform": figure.transFigure}
    axes.legend(loc="upper left", ncols=columns(words), **place, **LEGEND)
    return axes


def look(place: int, colors: Sequence[str] = COLORS) -> dict[str, Any]:
    """Color, mark and line of one of several curves."""
    dashes = DASHES[place // len(colors) % len(DASHES)]
    return {"color": colors[place % len(colors)], "marker": MARKERS[place % len(MARKERS)], "linestyle": dashes}


def band(axes: Axes, x: Sequence[float] | np.ndarray, low: Any, high: Any, color: str) -> None:
    """The range around a curve."""
    axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)


def ticks_at(axis: Axis, places: Sequence[float] | Locator, factor: float = 1) -> None:
    """Ticks at these places alone, with `factor` times the value."""
    axis.set_major_locator(places if isinstance(places, Locator) else FixedLocator(places))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: units.tick(value if factor == 1 else round(value * factor, 6)))
    )


def set_ticks(
    axis: Axis, most: int, steps: Sequence[float] | None = (1, 2, 5, 10), factor: float = 1, **options: Any
) -> None:
    """At most so many ticks at round numbers of `factor` times the value."""
    ticks_at(axis, MaxNLocator(nbins=most, steps=steps, **options), factor)


def time_unit(seconds: float) -> tuple[float, str]:
    """The largest unit that fits twice into a time, as its seconds and its name."""
    for size, name in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return size, name
    return 1, "seconds"


def course_axis(axes: Axes, last: float, **options: Any) -> None:
    """An x axis of time, or of updates (`integer`), from 0 to `last`."""
    axes.set_xlim(0, last if last > 0 else 1)
    set_ticks(axes.xaxis, 5, (1, 2, 2.5, 5, 10), **options)


def log_axes(axes: Axes, x: Iterable[float], y: Sequence[float]) -> None:
    """Both axes logarithmic, with ticks at the values of x, seven at most."""
    places = sorted(set(x))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(min(y) / 1.2, 1.2 * max(y))
    ticks_at(axes.xaxis, places[:: -(-len(places) // 7)])
    ticks_at(axes.yaxis, LogLocator(subs=(1, 2, 5), numticks=8))


def linear_axis(
    axes: Axes, values: np.ndarray, *, ticks: int = 5, at_least: float = 0, at_most: float = np.inf
) -> None:
    """A y axis from 0 (or below it, where values are) to a little above the largest value."""
    finite = values[np.isfinite(values)]
    top, low = max(finite, default=0.0), min(finite, default=0.0)
    axes.set_ylim(min(0, 1.08 * low), min(max(1.08 * top, at_least), at_most) or 1)
    set_ticks(axes.yaxis, ticks)


def wide_axis(axes: Axes, values: np.ndarray) -> None:
    """A y axis that lets a curve use its height.

    Logarithmic where values ≥ 0 span more than a factor of 20; values of exactly 0 stay visible on it: below the
    smallest positive value it is linear down to 0. Else linear: from 0, or, where that would leave a third of the panel
    empty below the curves, from a little below the smallest value.
    """
    positive = values[np.isfinite(values) & (values > 0)]
    if len(positive) == 0 or (values < 0).any() or positive.max() / positive.min() <= 20:
        linear_axis(axes, values)
        low, high = min(positive, default=0.0), max(positive, default=0.0)
        if high > low > high / 3 and not (values <= 0).any():
            margin = 0.06 * max(high - low, 0.01 * high)
            axes.set_ylim(low - margin, high + margin)
        return
    low, high = float(positive.min()), float(positive.max())
    locator = LogLocator(subs=(1, 2, 5) if high < 500 * low else (1,), numticks=8)
    ticks = [tick for tick in locator.tick_values(low / 1.15, 1.15 * high) if low / 1.15 <= tick <= 1.15 * high]
    if (values == 0).any():
        axes.set_yscale("symlog", linthresh=low, linscale=0.4)
        axes.set_ylim(0, 1.15 * high)
        ticks = [0.0, *(tick for tick in ticks if tick >= low)]
    else:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.15, 1.15 * high)
    ticks_at(axes.yaxis, ticks)
