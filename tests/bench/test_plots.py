"""The legend of a picture: as many columns as fit."""

import pytest

from convoy.bench.plots import PLOT, legend_above, legend_room
from convoy.report import axes as ax

SHORT = ["one device", "sample=2, shares auto", "filter=2"]
LONG = ["sample=4, shares auto", "sample=2, shares auto", "sample=2,filter=2, shares auto"]


def right_edge(words: list[str], columns: int) -> float:
    """Of the legend, as a part of the picture's width."""
    with ax.house_style():
        figure = ax.new_figure(ax.TOP + PLOT + ax.BOTTOM)
        axes = ax.add_axes(figure, "a picture", "devices")
        handles = [axes.plot([0, 1], [0, 1])[0] for _ in words]
        legend_above(axes, handles, words, columns, ax.LEFT)
        figure.draw_without_rendering()
        return float(axes.get_legend().get_window_extent().x1 / figure.bbox.x1)


@pytest.mark.parametrize(("words", "columns"), [(SHORT, 2), (LONG, 1)], ids=["short", "long"])
def test_it_stays_within_the_picture(words: list[str], columns: int) -> None:
    found, above = legend_room(words, 2)
    assert found == columns
    assert right_edge(words, found) <= 1
    assert right_edge(LONG, 2) > 1
    assert above - ax.TOP == pytest.approx(15 * (-(-len(words) // found) - 1))
