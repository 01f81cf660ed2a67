"""The verbs, as a person calls them."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.calls import Call
from convoy.training.restore import evaluate_run, evaluation_data, load_run
from tiny import TinyNet, write_pictures


def test_the_default_folder_is_new(run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tiny-TinyNet-data").mkdir(parents=True)
    text = call(f"train --recipe {run / 'config.yaml'} --epochs 1ba --trust-code -v").out
    assert "peak learning rate" in text and "optimizer.lr as said" in text
    assert "update 1 of 1: test top-1" in text and "epoch 0.25" not in text  # as the length was given
    assert f"report: {Path('runs') / 'tiny-TinyNet-data-2' / 'report.html'}" in text


def test_ctrl_c_while_modules_load_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    line = [sys.executable, "-m", "convoy", "models"]
    done = subprocess.run(line, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "convoy: interrupted\n")


def test_pictures_that_are_skipped_are_counted(tmp_path: Path, call: Call) -> None:
    data, run = write_pictures(tmp_path / "data"), tmp_path / "run"
    (data / "train" / "b" / "0.png").write_bytes(b"")
    options = "--set data.image_size=28 --set threads=1 --workers 0 --bad-images skip"
    text = call(f"train tiny:TinyNet --data {data} --batch 12 --epochs 1 {options} --out {run}").out
    assert f"skipped 1 picture that cannot be read, named in {run / 'summary.json'}\n" in text


def test_reports_and_a_resume_of_a_finished_run_change_nothing(run: Path, tmp_path: Path, call: Call) -> None:
    names = ("summary.json", "evaluation.json", "environment.json", "metrics.jsonl", "plan.yaml", "report.html")
    before = {name: (run / name).read_bytes() for name in (*names, "weights.safetensors")}
    call(f"report {run}")
    assert "going on after 16 of 16" in call(f"train {run} --resume").out
    assert {name: (run / name).read_bytes() for name in before} == before


def test_eval_gives_what_the_run_measured_of_every_class(run: Path, call: Call) -> None:
    (row,) = call(f"eval {run} --per-class --json").document
    summary = json.loads((run / "summary.json").read_text())
    assert (row["top1"], row["images"]) == (summary["top1"], 40)
    assert row["loss"] == pytest.approx(summary["loss"], rel=1e-6)
    confusion = torch.tensor(json.loads((run / "evaluation.json").read_text())["confusion"])
    assert [each["class"] for each in row["classes"]] == [str(number) for number in range(10)]
    for number, each in enumerate(row["classes"]):
        right, true, taken = confusion[number, number].item(), *(confusion.sum(d)[number].item() for d in (1, 0))
        assert each["samples"] == true == 4 and each["recall"] == right / true
        assert each["precision"] == (right / taken if taken else None)
    table = list(csv.DictReader(io.StringIO(call(f"eval {run} --per-class --csv").out)))
    assert [float(each["recall"]) for each in table] == [each["recall"] for each in row["classes"]]


def test_eval_prepares_other_data_as_the_run_did(data: Path, tmp_path: Path, call: Call) -> None:
    settings = f"--data {data} --batch 24 --epochs 1ba --set data.mean=[0.9] --set data.std=[0.1]"
    call(f"train tiny:TinyNet {settings} --out {tmp_path / 'run'}")
    loss = json.loads((tmp_path / "run" / "summary.json").read_text())["loss"]
    copy = shutil.copytree(data, tmp_path / "copy")
    (row,) = call(f"eval {tmp_path / 'run'} --data {copy} --json").document
    assert row["loss"] == pytest.approx(loss, rel=1e-6)
    trained = load_run(tmp_path / "run")
    images, _ = evaluation_data(trained)
    object.__setattr__(images, "mean", (0.1,))  # the negative control
    assert evaluate_run(trained, images, torch.device("cpu")).loss != pytest.approx(loss, rel=1e-6)


@pytest.mark.slow
def test_an_exported_network_runs_elsewhere(run: Path, tmp_path: Path, call: Call) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    model = TinyNet().eval()
    model.load_state_dict(load_file(run / "weights.safetensors"))
    images = torch.randn(5, 1, 28, 28)
    with torch.no_grad():
        logits = model(images)
    call(f"export {run} --to {tmp_path / 'x.onnx'}")
    session = onnxruntime.InferenceSession(str(tmp_path / "x.onnx"), providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"])[3] == "3"
    assert torch.allclose(torch.from_numpy(session.run(None, {"images": images.numpy()})[0]), logits, atol=1e-4)

    text = call(f"export {run} --to {tmp_path / 'x.pt2'}").out
    assert f"wrote {tmp_path / 'x.pt2'}; torch.export.load's outputs differ" in text
    files = {"convoy.json": ""}
    program = torch.export.load(tmp_path / "x.pt2", extra_files=files).module()
    with torch.no_grad():
        assert torch.allclose(program(images), logits, atol=1e-6)
    assert json.loads(files["convoy.json"])["classes"][3] == "3"
