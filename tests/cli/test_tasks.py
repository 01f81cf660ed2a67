"""The commands of docs/tasks.md, on small made data, and what their runs are used for."""

import json
import re
import shlex
from pathlib import Path

import pytest

from cli.calls import Call
from tasks.test_tasks import write_task

PAGE = (Path(__file__).parents[2] / "docs/tasks.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^convoy (train .*--epochs 30.*)$", PAGE, re.MULTILINE)
FOLDERS = {"species": "classification", "tags": "multi-label", "ages": "regression", "scans": "segmentation"}
BEST = {"classification": "top1", "multi-label": "map", "regression": "r2", "segmentation": "iou"}


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=[pytest.mark.slow] if "resnet18" in line else []) for line in COMMANDS]
)
def test_every_command_trains(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.chdir(tmp_path)
    folder = re.findall(r"--data (\w+)/", line)[0]
    task = FOLDERS[folder]
    write_task(Path(folder), task)
    quick = ["--best", "r2"] if task == "regression" else []
    quick += ["--batch", "12", "--image-size", "16", "--device", "cpu", "--out", "run", "--set", "data.workers=0"]
    quick += ["--set", "model.options={width: 4, depth: 2}"] if "unet" in line and "width" not in line else []
    if task == "regression":
        refused = call("bench lenet --devices 1 --batch 8 --data ages --train-epochs 1 --out study", status=2)
        assert "--train-epochs compares test errors" in refused.err and not Path("study").exists()
    arguments = shlex.split(line.replace("--epochs 30", "--epochs 1").replace("resnet18", "resnet18-cifar"))
    call([*arguments, *quick])
    (row,) = call(["eval", "run", "--per-class", "--json"]).document
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["best_metric"] == BEST[task]
    assert row[BEST[task]] == pytest.approx(summary["metrics"][BEST[task]], rel=1e-5)
    assert len(row["classes"]) == {"regression": 2}.get(task, 3)
    answers = call(["predict", "run", f"{folder}/0.png", f"{folder}/1.png"]).out.splitlines()
    assert "'" not in "".join(answers), "a number is no formula, even one below zero"
    number = {"regression": "value", "segmentation": "share"}.get(task, "probability")
    assert answers[0] == f"file,rank,class,{number}" and len(answers) == 1 + 2 * len(row["classes"])
    page = Path("run/report.html").read_text()
    assert ("What it confuses" in page) == (task == "classification")
    assert ("Worst pictures" in page) == (task == "segmentation")
    assert page.count('<figure id="plot-points-') == {"regression": 2}.get(task, 0)
    assert page.count('class="swatch"') == {"segmentation": 3}.get(task, 0)


@pytest.mark.parametrize(
    "setting",
    [
        "data.mix.mixup=0.2",
        "loss.label_smoothing=0.1",
        "evaluation_views=2",
        "loss.name=mse",
        "data.augment.function=mine.py:same",  # which would leave the masks where they are, as the next
        "data.augment.trivial_augment=true",
        "data.augment.rand_augment=n2-m9",
    ],
)
def test_what_is_not_for_a_task(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.chdir(tmp_path)
    write_task(Path("scans"), "segmentation")
    Path("mine.py").write_text("def same(picture, rng): return picture\n")
    refused = call(["train", "unet", "--data", "scans", "--batch", "12", "--set", setting, "--out", "run"], status=2)
    assert setting.partition("=")[0] in refused.err and not Path("run").exists()
