"""Predicted beside measured, and the speed-up, in the report of a run; quiet where there is nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from convoy.planner.comparison import GRADIENTS, Both, Comparison, Group
from convoy.report.remarks import about, bench_command
from convoy.report.report import compared, render
from convoy.report.run_directory import Run, read_run
from report.made_runs import ENVIRONMENT, summary, write_run
from report.pages import harmless


def comparison(predicted: bool = True, **changes: Any) -> Comparison:
    """Of a network of two layers; every prediction is twice what was measured."""

    def both(measured: float) -> Both:
        return Both(2 * measured if predicted else None, measured)

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


def predicted_run(folder: Path, prediction: Comparison | None, **results: Any) -> Run:
    run = write_run(folder, results=summary(**results), environment={**ENVIRONMENT, "run": "runs/my first"})
    if prediction is not None:
        (run / "prediction.json").write_text(json.dumps(prediction.to_document()), encoding="utf-8")
    return read_run(run)


def test_all_of_it_is_on_the_page(tmp_path: Path) -> None:
    html = render(predicted_run(tmp_path, comparison()))
    shown = harmless(html).words
    for words in (
        "An update took 17.0 ms, the median of 55; 34.0 ms were predicted (+100 %).", "predicted and measured",
        "those of rank 1, each the median of 3 other updates that were watched: they add up to 17.0 ms.", "features.0",
        "learnt the times of 11 pieces", "22.0 ms", "waiting for messages", GRADIENTS, "<b>fc</b>",
    ):  # fmt: skip
        assert words in shown, words
    assert "packing for messages" not in shown and "<i>so</i>" not in html  # nothing was packed
    short = comparison(update=Both(1e-3, None), parts={}, groups=(), timed=0, watched=0)
    for name, prediction in (("short", short), ("none", None)):
        assert 'id="update"' not in render(predicted_run(tmp_path / name, prediction))


def test_bars_are_shares_of_the_longest_and_stages_have_a_table(tmp_path: Path) -> None:
    whole = compared(comparison())
    assert whole is not None and whole["sum"] == "17.0 ms"
    assert [sum(part[1] for part in track["parts"]) for track in whole["whole"]["tracks"]] == pytest.approx([100, 50])
    longest = whole["groups"][0]
    assert [part[1] for part in longest["tracks"][0]["parts"]] == pytest.approx([100 * 18 / 22, 100 * 4 / 22])
    facts = {"forward": 8192, "backward": 4096, "parameters": 12_345, "gradients": 12_345, "activations": 10**6}
    stages = [{"layer": "fc<b>", "ranks": [0], "takes": ["pool"], **facts}]
    times = (Group("stage 1", Both(None, 0.012), Both(None, 2e-3), (1,)),)
    shown = harmless(render(predicted_run(tmp_path, comparison(stages=times), stages=stages))).words
    assert all(word in shown for word in ("fc<b>", "12.0 ms", "2.00 ms", "Takes the output of"))


def test_it_is_said_whether_several_devices_were_faster_and_how_to_find_out(tmp_path: Path) -> None:
    open_question = "Whether 2 devices were faster than one was not measured. This measures it:"
    for one, predicted, sentence in (
        (34e-3, 17e-3, "and 34.0 ms were predicted of one device: 2 devices were 2.00 times as fast as one."),
        (17.1e-3, 17e-3, "2 devices were as fast as one."),
        (8.5e-3, 17e-3, "2 devices were slower than one, which would need 50 % of the time."),
        (34e-3, 9e-3, "That is in doubt: the prediction of the plan itself was off by -47 %. This measures it:"),
        (None, 17e-3, open_question),
    ):
        prediction = comparison(update=Both(predicted, 17e-3), one_device_s=one)
        run = predicted_run(tmp_path / sentence[:20], prediction, devices=2, plan="sample=2")
        assert about(run)[-1].replace("\u202f", " ").endswith(sentence)
        assert bool(bench_command(run)) == ("This measures it" in sentence)
    command = "convoy bench lenet --data mnist-mini --recipe 'runs/my first/config.yaml' --devices 1,2 --plans "
    for plan, word in (("sample=2", "sample=2"), ("gpu=2: features.* gpu:sample; *", "'runs/my first/plan.yaml'")):
        run = predicted_run(tmp_path / plan[:4], None, devices=2, plan=plan)
        assert bench_command(run) == command + word
    words = harmless(render(run)).words
    assert open_question in words and command + word in words
    assert "convoy bench" not in render(predicted_run(tmp_path / "one", None))
