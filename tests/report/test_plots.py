import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from convoy.report import axes
from convoy.report.plots import data_wait_shares, draw_panels, in_pieces
from convoy.report.run_directory import read_run
from report.made_runs import CONFIG, complete_run, metrics, write_run

NAMES = ["loss-updates", "loss-time", "error-updates", "error-time", "learning-rate", "speed"]


def draw_curves(run: Path) -> dict[str, Figure]:
    return {panel.name: panel.figure for panel in draw_panels(read_run(run)) if panel.figure is not None}


def curve(run: Path, name: str, label: str) -> Any:
    drawn = draw_curves(run)[name].axes[0]
    return next(line for line in drawn.lines if line.get_label() == label)


def test_all_curves_are_drawn_and_can_be_saved(tmp_path: Path) -> None:
    figures = draw_curves(complete_run(tmp_path))
    assert list(figures) == NAMES
    figures["loss-time"].savefig(tmp_path / "loss.svg")
    figures["loss-time"].savefig(tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.size == (680, 504)


def test_plots_leave_global_state_alone(tmp_path: Path) -> None:
    before = mpl.rcParams.copy()
    draw_curves(complete_run(tmp_path))
    assert mpl.rcParams.copy() == before
    assert "matplotlib.pyplot" not in sys.modules


def test_curves_hold_the_numbers_of_the_file(tmp_path: Path) -> None:
    lines = metrics()
    run = complete_run(tmp_path, lines=lines)
    test = [line for line in lines if line["split"] == "test"]
    drawn = curve(run, "error-updates", "test")
    np.testing.assert_allclose(drawn.get_xdata(), [line["step"] for line in test])
    np.testing.assert_allclose(drawn.get_ydata(), [100 * (1 - line["top1"]) for line in test])
    np.testing.assert_allclose(curve(run, "loss-time", "test").get_xdata(), [line["time_s"] for line in test])


def test_train_and_test_differ_in_color_and_in_line_style(tmp_path: Path) -> None:
    drawn = draw_curves(complete_run(tmp_path))["error-updates"].axes[0]
    named = [line for line in drawn.lines if not line.get_label().startswith("_")]
    assert [line.get_label() for line in named] == ["train", "test"]
    assert len({line.get_color() for line in named}) == 2
    assert len({(str(line._unscaled_dash_pattern), line.get_marker()) for line in named}) == 2


def test_evaluations_of_averaged_weights_are_called_so(tmp_path: Path) -> None:
    run = complete_run(tmp_path)
    (run / "config.yaml").write_text(f"{CONFIG}ema: {{decay: 0.99}}\n")
    for name in ("loss-time", "error-updates"):
        assert len(curve(run, name, "test, averaged weights").get_xdata()) == 4


def test_a_loss_that_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    lines = metrics()
    lines[5]["loss"] = None
    losses = curve(complete_run(tmp_path, lines=lines), "loss-updates", "train").get_ydata()
    assert np.isnan(losses).sum() == 1


def test_a_single_point_is_drawn_as_a_dot(tmp_path: Path) -> None:
    drawn = draw_curves(write_run(tmp_path, lines=metrics()[:1]))["loss-updates"].axes[0]
    assert [line.get_marker() for line in drawn.lines if len(line.get_xdata()) == 1 and line.get_marker() != ""][
        -1
    ] == "o"


def test_a_long_run_is_drawn_in_pieces_that_keep_mean_range_and_gaps() -> None:
    x, y = np.arange(1000.0), np.arange(1000.0)
    y[999] = np.nan
    middle, mean, low, high = in_pieces(x, y, pieces=300)
    assert len(mean) == 300
    assert (mean[0], low[0], high[0]) == (1.0, 0.0, 2.0)
    assert np.isnan(mean[-1]) and np.isfinite(middle[-1])


@pytest.mark.parametrize(
    ("first", "last", "low", "high"),
    [(1.1, 0.7, 0.676, 1.124), (1.1, 0.2, 0.0, 1.188), (0.5, 0.5, 0.0, 0.54), (1.0, 1.001, 0.9993994, 1.0016006)],
)
def test_a_curve_uses_the_height_of_its_panel(
    tmp_path: Path, first: float, last: float, low: float, high: float
) -> None:
    lines = [
        {"split": "train", "step": step, "loss": float(loss)}
        for step, loss in enumerate(np.linspace(first, last, 30), start=1)
    ]
    drawn = draw_curves(write_run(tmp_path, lines=lines))["loss-updates"].axes[0]
    assert drawn.get_yscale() == "linear"
    assert drawn.get_ylim() == pytest.approx((low, high), abs=1e-9)


def test_an_error_of_zero_stays_on_the_axis(tmp_path: Path) -> None:
    lines = metrics()
    lines[-2]["top1"], lines[-1]["top1"] = 1.0, 0.999
    drawn = draw_curves(complete_run(tmp_path, lines=lines))["error-updates"].axes[0]
    assert drawn.get_yscale() == "symlog"
    assert drawn.get_ylim()[0] == 0
    assert drawn.get_yticks()[0] == 0


@pytest.mark.parametrize(
    ("rates", "scale"),
    [
        ([0.1] * 5 + [0.01] * 5 + [0.001] * 5, "log"),
        (np.linspace(0.1, 0, 15), "linear"),
        ([0.05, 0.03, 0.0001, 0.00001], "linear"),
        ([0.1] * 5, "linear"),
    ],
)
def test_a_learning_rate_that_falls_by_factors_has_a_logarithmic_axis(tmp_path: Path, rates: Any, scale: str) -> None:
    lines = [{"split": "train", "step": step, "lr": float(rate)} for step, rate in enumerate(rates, start=1)]
    assert draw_curves(write_run(tmp_path, lines=lines))["learning-rate"].axes[0].get_yscale() == scale


def test_data_wait_is_a_share_of_the_training_time(tmp_path: Path) -> None:
    lines = [
        {"split": "train", "step": 10, "images_per_s": 640.0, "data_wait_s": 0.5, "time_s": 2.0},
        {"split": "test", "step": 10, "time_s": 5.0},
        {"split": "train", "step": 20, "images_per_s": 640.0, "data_wait_s": 0.2, "time_s": 7.0},
    ]
    np.testing.assert_allclose(data_wait_shares(read_run(write_run(tmp_path, lines=lines))), [0.25, 0.1])
    no_batch = CONFIG.replace("batch: 128\n", "")
    np.testing.assert_allclose(
        data_wait_shares(read_run(write_run(tmp_path, lines=lines, config=no_batch))), [0.25, 0.04]
    )


def test_values_that_make_no_sense_are_gaps_and_no_crash(tmp_path: Path) -> None:
    line = {"split": "train", "step": 0, "loss": 0.0, "top1": 1.0, "lr": 0.0, "images_per_s": 0.0, "data_wait_s": 0.0}
    figures = draw_curves(write_run(tmp_path, lines=[{**line, "time_s": 0.0}]))
    assert list(figures) == NAMES


def test_without_times_there_are_still_updates(tmp_path: Path) -> None:
    lines = [{**line, "time_s": None} for line in metrics()]
    assert list(draw_curves(write_run(tmp_path, lines=lines))) == ["loss-updates", "error-updates", "learning-rate"]


def test_a_run_without_metrics_has_no_curves_but_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    assert draw_curves(run) == {}
    assert {panel.description for panel in draw_panels(read_run(run))} == {"Nothing has been recorded yet."}


@pytest.mark.parametrize(
    ("seconds", "unit"), [(50, "seconds"), (119, "seconds"), (120, "minutes"), (7200, "hours"), (172_800, "days")]
)
def test_time_has_the_unit_that_fits(seconds: float, unit: str) -> None:
    assert axes.time_unit(seconds)[1] == unit
