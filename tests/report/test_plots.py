"""The curves of a run, as drawings and inside the page; tables of confusion, and pictures."""

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from convoy.errors import ConvoyError
from convoy.report.pages import read_picture
from convoy.report.plots import draw_panels
from convoy.report.run_directory import read_run
from report.made_runs import CONFIG, metrics, write_run

NAMES = ["loss-updates", "loss-time", "error-updates", "error-time", "learning-rate", "speed"]


def draw(folder: Path, lines: list[dict[str, Any]], config: str = CONFIG) -> dict[str, Figure]:
    """The figures of a run with these metrics, by name."""
    panels = draw_panels(read_run(write_run(folder, lines=lines, config=config)))
    return {panel.name: panel.figure for panel in panels if panel.figure is not None}


def test_curves_hold_the_numbers_of_the_file_and_leave_global_state_alone(tmp_path: Path) -> None:
    before = mpl.rcParams.copy()
    lines = metrics()
    lines[5]["loss"] = None
    test = [line for line in lines if line["split"] == "test"]
    figures = draw(tmp_path, lines)
    assert list(figures) == NAMES
    curves = {line.get_label(): line for line in figures["error-updates"].axes[0].lines}
    np.testing.assert_allclose(curves["test"].get_xdata(), [line["step"] for line in test])
    np.testing.assert_allclose(curves["test"].get_ydata(), [100 * (1 - line["top1"]) for line in test])
    loss, *_ = figures["loss-updates"].axes[0].lines
    assert np.isnan(loss.get_ydata()).sum() == 1  # a loss that is not finite is a gap
    assert len({(line.get_color(), line.get_marker()) for line in (curves["train"], curves["test"])}) == 2
    assert mpl.rcParams.copy() == before and "matplotlib.pyplot" not in sys.modules


def test_a_corrupt_picture_and_one_outside_the_run_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "a.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing more")
    with pytest.raises(ConvoyError, match=r"a\.png is not a readable"):
        read_picture(run, "a.png")
    Image.new("L", (8, 8)).save(tmp_path / "private.png")
    (run / "link.png").symlink_to(tmp_path / "private.png")
    for name in ("link.png", "../private.png"):
        with pytest.raises(ConvoyError, match="outside the run directory"):
            read_picture(run, name)
