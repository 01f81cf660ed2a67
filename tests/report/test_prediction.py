"""Predicted beside measured in the report of a run: drawn, in numbers, and quiet where there is nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from convoy import units
from convoy.errors import ConvoyError
from convoy.planner.comparison import GRADIENTS, Both, Comparison, Group
from convoy.report.prediction import compared
from convoy.report.report import write_report
from convoy.report.run_directory import read_run
from report.made_runs import complete_run, summary


def comparison(predicted: bool = True, **changes: Any) -> Comparison:
    """Of a network of two layers; every prediction is twice what was measured."""

    def both(measured: float) -> Both:
        return Both(2 * measured if predicted else None, measured)

    parts = {"input": 1e-3, "forward": 4e-3, "backward": 8e-3, "rest": 1e-3, "packing": 0.0, "waiting": 3e-3}
    values: dict[str, Any] = {
        "model": "lenet",
        "plan": "sample=2",
        "devices": 2,
        "batch": 128,
        "rank": 1,
        "timed": 55,
        "watched": 3,
        "learned": 11,
        "update": both(17e-3),
        "parts": {name: both(seconds) for name, seconds in parts.items()},
        "groups": (
            Group("features.0", both(9e-3), both(2e-3)),
            Group("<b>fc</b>", both(3e-3), both(0.0)),
            Group(GRADIENTS, both(0.0), both(1e-3)),
        ),
        "notes": ("said <i>so</i>",),
        **changes,
    }
    return Comparison(**values)


def with_prediction(folder: Path, found: Comparison | dict[str, Any]) -> Path:
    run = complete_run(folder)
    document = found.to_document() if isinstance(found, Comparison) else found
    (run / "prediction.json").write_text(json.dumps(document), encoding="utf-8")
    return run


def test_stages_have_a_table_with_what_was_measured(tmp_path: Path) -> None:
    stages = [Group(f"stage {number}", Both(None, 0.012), Both(None, number * 1e-3), (number,)) for number in (1, 2)]
    run = with_prediction(tmp_path, comparison(stages=tuple(stages)))
    facts = {"forward": 8192, "backward": 4096, "parameters": 12_345, "gradients": 12_345, "activations": 10**6}
    one = {"layer": "conv1", "ranks": [0], "takes": [], **facts}
    other = {"layer": "fc<b>", "ranks": [1, 2], "takes": ["pool"], **facts}
    found = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    (run / "summary.json").write_text(json.dumps({**found, "stages": [one, other]}), encoding="utf-8")
    html = write_report(run).read_text(encoding="utf-8")
    words = ["Takes the output of", "conv1", "fc&lt;b&gt;", "1, 2", "pool", "8.19 kB", "4.1 kB", "12.3 kB", "1 MB"]
    assert all(word in html for word in [*words, "Computes", "12.0 ms", "1.00 ms", "2.00 ms"])
    (run / "prediction.json").unlink()
    shown = write_report(run).read_text(encoding="utf-8")
    assert "fc&lt;b&gt;" in shown and "Computes" not in shown
    (run / "summary.json").write_text(json.dumps(found), encoding="utf-8")
    assert "Takes the output of" not in write_report(run).read_text(encoding="utf-8")


def test_all_of_it_is_on_the_page(tmp_path: Path) -> None:
    html = write_report(with_prediction(tmp_path, comparison())).read_text(encoding="utf-8")
    for words in (
        "An update, predicted and measured",
        "An update took 17.0 ms, the median of 55; 34.0 ms were predicted (+100 %).",
        "those of rank 1, each the median of 3 other updates that were watched: they add up to 17.0 ms.",
        "learnt the times of 11 pieces",
        "features.0",
        "22.0 ms",
        "waiting for messages",
        GRADIENTS,
    ):
        assert words in html, words
    assert "<b>fc</b>" not in html and "&lt;b&gt;fc&lt;/b&gt;" in html
    assert "<i>so</i>" not in html
    assert "packing for messages" not in html.split("<body>")[1]  # nothing was packed


def test_bars_are_shares_of_the_longest(tmp_path: Path) -> None:
    found = compared(read_run(with_prediction(tmp_path, comparison())).prediction)
    assert found is not None
    first, second = found.whole.tracks
    assert [sum(width for _, width, _ in track.parts) for track in (first, second)] == pytest.approx([100, 50])
    longest = found.groups[0]
    assert [(key, width) for key, width, _ in longest.tracks[0].parts] == [
        ("forward", pytest.approx(100 * 18 / 22)),
        ("transfer", pytest.approx(100 * 4 / 22)),
    ]
    assert (longest.predicted, longest.measured, longest.difference) == ("22.0 ms", "11.0 ms", "+100 %")


def test_what_was_not_predicted_is_not_off_by_anything(tmp_path: Path) -> None:
    parts = {"input": Both(0.0, 9e-3), "forward": Both(1e-3, 2e-3), "backward": Both(None, 6e-3)}
    found = compared(read_run(with_prediction(tmp_path, comparison(parts=parts))).prediction)
    assert found is not None and (found.sum, found.whole.measured) == ("17.0 ms", "17.0 ms")
    assert [row.difference for row in found.parts] == ["", "-50 %", ""]


def test_without_a_prediction_there_is_what_was_measured(tmp_path: Path) -> None:
    run = with_prediction(tmp_path, comparison(predicted=False))
    found = compared(read_run(run).prediction)
    assert found is not None and not found.both
    assert [track.name for track in found.whole.tracks] == ["measured"]
    html = write_report(run).read_text(encoding="utf-8")
    assert "An update took 17.0 ms, the median of 55." in html
    assert "predicted and measured" not in html


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update", "why"),
    [(13e-3, ", as watching takes time too"), (17.1e-3, ""), (20e-3, ", as no two updates are alike")],
)
def test_parts_that_add_up_to_another_time_say_why(tmp_path: Path, update: float, why: str) -> None:
    run = with_prediction(tmp_path, comparison(update=Both(None, update)))
    found = compared(read_run(run).prediction)
    assert found is not None
    assert (found.whole.name, found.whole.measured, found.sum) == ("All parts", "17.0 ms", f"17.0 ms{why}")
    assert f"they add up to 17.0 ms{why}." in write_report(run).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (34e-3, "An update took 17.0 ms, and 34.0 ms were predicted of one device: 2 devices were 2.00 times as fast"),
        (17.1e-3, "2 devices were as fast as one."),
        (8.5e-3, "2 devices were slower than one, which would need 50 % of the time."),
        (None, "Whether 2 devices were faster than one was not measured. This measures it:"),
    ],
)
def test_it_is_said_whether_several_devices_were_faster(tmp_path: Path, one: float | None, said: str) -> None:
    right = comparison(update=Both(17e-3, 17e-3), one_device_s=one)
    run = with_prediction(tmp_path, right)
    (run / "summary.json").write_text(json.dumps(summary(devices=2, plan="sample=2")), encoding="utf-8")
    html = write_report(run).read_text(encoding="utf-8").replace(units.SPACE, " ")
    assert said in html
    assert ("convoy bench lenet" in html) == (one is None)
    wrong = comparison(update=Both(9e-3, 17e-3), one_device_s=one)
    (run / "prediction.json").write_text(json.dumps(wrong.to_document()), encoding="utf-8")
    html = write_report(run).read_text(encoding="utf-8")
    assert ("That is in doubt: the prediction of the plan itself was off by -47 %." in html) == (one is not None)
    assert "convoy bench lenet" in html


@pytest.mark.slow
def test_a_run_that_was_not_looked_at_says_nothing(tmp_path: Path) -> None:
    short = comparison(update=Both(1e-3, None), parts={}, groups=(), timed=0, watched=0)
    html = write_report(with_prediction(tmp_path, short)).read_text(encoding="utf-8")
    assert 'id="update"' not in html
    assert 'id="update"' not in write_report(complete_run(tmp_path / "other")).read_text(encoding="utf-8")


@pytest.mark.parametrize("change", [{"version": 2}, {"update": {"measured_s": -1.0}}, {"groups": 3}])
def test_what_cannot_be_read_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    run = with_prediction(tmp_path, {**comparison().to_document(), **change})
    with pytest.raises(ConvoyError, match=r"prediction\.json"):
        write_report(run)
