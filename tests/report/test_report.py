"""The page of a run: what stands on it, that it is harmless, and what it says of a run's state and result."""

import base64
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from convoy.planner.comparison import GRADIENTS
from convoy.report.plots import draw_panels
from convoy.report.remarks import remarks
from convoy.report.report import render, write_report
from convoy.report.run import read_run
from convoy.run.directory import RunDirectory
from convoy.tasks.classification import Classification
from report.made_runs import CONFIG, ENVIRONMENT, comparison, complete_run, evaluation, metrics, summary, write_run
from report.pages import HOSTILE, Page, harmless


def page(run: Path) -> Page:
    return Page(render(read_run(run)))


def test_a_complete_run_has_every_part_and_the_same_bytes_again(tmp_path: Path) -> None:
    run = complete_run(tmp_path, results=summary(notes=["The head was replaced."]))
    report = write_report(run)
    content = report.read_bytes()
    assert report == run / "report.html" and write_report(run).read_bytes() == content
    shown = harmless(content.decode())
    for part in (
        "lenet on mnist-mini", "Finished", "61,706", "Every class in numbers (10)",
        "lenet recognizes 93.4 % of 1,000 test images after 4 epochs in 2 min 14 s on 1 device.", "833 kFLOP",
        "0.2 · 128 / 256", "linear scaling rule: Goyal et al., 2017", "32, 32, 32, 32", "The head was replaced.",
        "convoy train lenet --data mnist-mini --out runs/first", "label_smoothing: 0.0", "2026-03-01 10:00 UTC",
    ):  # fmt: skip
        assert part in shown.words, part
    assert len(shown.all("svg")) == len(shown.all("img")) == 6
    assert all(image["alt"] for image in shown.all("img"))
    (link,) = shown.all("a")
    raw = (run / "metrics.jsonl").read_bytes()
    assert (link["download"], base64.b64decode((link["href"] or "").partition(",")[2])) == ("metrics.jsonl", raw)
    (run / "mistakes" / "00.png").unlink()
    (run / "metrics.jsonl").unlink()
    assert "picture missing" in page(run).words and "No metrics have been recorded yet" in page(run).words


def test_the_metric_that_decides_comes_first_and_ones_own_are_everywhere(tmp_path: Path) -> None:
    kappas, lines = [0.7, 0.02, -3.1], metrics()
    for line in [line for line in lines if line["split"] == "test"][1:]:  # the first line has none of them
        line |= {"err": 0.2, "kappa": kappas.pop()}
    results = summary(best_metric="err", best_step=62, metrics={"err": 0.1875, "kappa": 0.72})
    text = CONFIG + "metrics: ['mine.py:kappa', 'mine.py:err']\n"
    final = evaluation("ab") | {"confusion": [[9, 0], [0, 9]]}
    shown = page(run := complete_run(tmp_path, lines=lines, config=text, results=results, final=final))
    assert "Every test image was classified correctly." in shown.words
    assert re.search(r"Test err0.1875.*Test accuracy.*Test kappa0.72", shown.words)
    assert "lenet has err 0.1875 on 200 test images" in shown.words and "Bold: the best err." in shown.words
    plots = [figure["id"] for figure in shown.all("figure")]
    assert plots[:2] == ["plot-metric-err-updates", "plot-metric-err-time"]
    (figure,) = (panel.figure for panel in draw_panels(read_run(run)) if panel.name == "metric-kappa-time")
    assert figure is not None and figure.axes[0].get_ylim()[0] < -3.1


def test_training_losses_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    for task, loss, words in (
        ("classification", "class_weights: balanced", "is cross-entropy with class weights, that of evaluations plain"),
        ("regression", "function: mine.py:huber", "is mine.py:huber, that of evaluations plain mean squared error: "),
        ("multi-label", "name: bce", ""),
    ):
        run = complete_run(tmp_path / task, config=f"{CONFIG}  {loss}\n", environment={"input": {"task": task}})
        text = " ".join(remarks(read_run(run)))
        assert words in text and ("cannot be compared" in text) == bool(words)


def test_of_many_classes_counts_that_are_not_0_are_kept(tmp_path: Path) -> None:
    done = Classification(names := [f"c{number}" for number in range(1001)]).evaluation()
    done.confusion[3, 5], done.confusion[4, 4] = 2, 1
    final = done.save(tmp_path, SimpleNamespace(task="classification", classes=names))  # type: ignore[arg-type]
    assert final["confusion"] == [[3, 5, 2], [4, 4, 1]]
    for content in (final, final | {"confusion": done.confusion.tolist()}):  # as it was written before
        assert "Of the class c3c52100.0 %" in page(complete_run(tmp_path, final=content)).words


def test_names_of_strangers_are_text_and_nothing_else(tmp_path: Path) -> None:
    everything = " ".join(HOSTILE)
    final = evaluation(HOSTILE)
    for mistake, name in zip(final["mistakes"], HOSTILE, strict=False):
        mistake["name"] = name
    lines = [name for name in HOSTILE if name.isascii() and name.isprintable()]
    bad = [{"name": name, "reason": name, "split": name} for name in [*HOSTILE, os.fsdecode(b"ship\xff.png")]]
    derived = [dict.fromkeys(("name", "value", "formula", "source"), name) for name in HOSTILE]
    results = summary(model=everything, data=everything, bad_images=bad, derived=derived, notes=HOSTILE)
    environment = {**ENVIRONMENT, "command": everything, "machine": everything, everything: HOSTILE}
    config = CONFIG + "note: |\n  " + "\n  ".join(lines) + '\n"<script>": 1\n'
    files = {"config": config, "final": final, "results": results, "environment": environment}
    shown = harmless(write_report(write_run(tmp_path, **files)).read_text(encoding="utf-8"))
    assert shown.text.count("<script>alert(1)</script>") >= 15 and len(shown.all("img")) == 6
    assert r"\x1b[2J" in shown.text and r"\u202egnp.exe" in shown.text and r"ship\udcff.png" in shown.text


GOES_ON = "--resume goes on from its last checkpoint"
STATES: list[tuple[dict[str, Any], bool, str, str]] = [
    ({"status": "failed", "error": "<b>"}, False, "Failed", f"124 of 124 updates (100 %): <b>; {GOES_ON}"),
    ({"status": "running"}, True, "Running", "The run was still going on when this page was written."),
    ({"status": "running"}, False, "Broken off", f"as one does that is killed; {GOES_ON}."),
]


def test_a_run_that_did_not_end_well_says_how_to_go_on_once(tmp_path: Path) -> None:
    for number, (results, training, word, sentence) in enumerate(STATES):
        run = write_run(tmp_path / str(number), results=summary(**results))
        with RunDirectory(run).lock():  # the lock tells
            words = page(run).words
        words = words if training else page(run).words
        assert f"report {word}" in words and sentence in words


def test_an_update_predicted_and_measured_is_on_the_page(tmp_path: Path) -> None:
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
