"""Predicted beside measured, and the speed-up, in the report of a run; quiet where there is nothing."""

import json
from pathlib import Path
from typing import Any

from convoy.planner.comparison import GRADIENTS, Both, Comparison, Group
from convoy.report.report import render
from convoy.report.run_directory import read_run
from report.made_runs import ENVIRONMENT, summary, write_run
from report.pages import harmless


def comparison(**changes: Any) -> Comparison:
    """Of a network of two layers; every prediction is twice what was measured."""

    def both(measured: float) -> Both:
        return Both(2 * measured, measured)

    parts = {"input": 1e-3, "forward": 4e-3, "backward": 8e-3, "rest": 1e-3, "packing": 0.0, "waiting": 3e-3}
    layers = (
        Group("features.0", both(9e-3), both(2e-3)),
        Group("<b>fc</b>", both(3e-3), both(0.0)),
        Group(GRADIENTS, both(0.0), both(1e-3)),
    )
    values: dict[str, Any] = {"model": "lenet", "plan": "sample=2", "devices": 2, "batch": 128, "rank": 1}
    values |= {"timed": 55, "watched": 3, "learned": 11, "update": both(17e-3), "groups": layers}
    values |= {"parts": {name: both(seconds) for name, seconds in parts.items()}, "notes": ("said <i>so</i>",)}
    return Comparison(**{**values, **changes})


def test_all_of_it_is_on_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path, results=summary(), environment=ENVIRONMENT)
    (run / "prediction.json").write_text(json.dumps(comparison().to_document()), encoding="utf-8")
    html = render(read_run(run))
    shown = harmless(html).words
    for words in (
        "An update took 17.0 ms, the median of 55; 34.0 ms were predicted (+100 %).", "predicted and measured",
        "those of rank 1, each the median of 3 other updates that were watched: they add up to 17.0 ms.", "features.0",
        "learnt the times of 11 pieces", "22.0 ms", "waiting for messages", GRADIENTS, "<b>fc</b>",
    ):  # fmt: skip
        assert words in shown, words
    assert "packing for messages" not in shown and "<i>so</i>" not in html  # nothing was packed
