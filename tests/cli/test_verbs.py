"""The verbs, as a person calls them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from convoy.cli import main
from convoy.cli.app import VERBS
from convoy.training.restore import restore
from tiny import TinyNet, write_mnist


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("verbs")
    data = write_mnist(tmp / "data")
    line = f"train tiny:TinyNet --data {data} --batch 24 --epochs 4 --lr 0.05 --set threads=1 --out {tmp / 'run'}"
    assert main(line.split()) == 0
    return tmp / "run"


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert f"convoy {verb} " in capsys.readouterr().out.partition("Example")[2]


def test_train_says_what_it_derives_and_where_the_report_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = run.parent / "again"
    line = f"train --recipe {run / 'config.yaml'} --out {again}"
    assert main(line.split()) == 0
    output = capsys.readouterr().out
    assert "peak learning rate" in output
    assert "optimizer.lr as said" in output
    assert "test accuracy" in output
    assert f"report: {again / 'report.html'}" in output
    assert (again / "report.html").exists()


def test_the_default_folder_is_never_one_that_exists(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["train", "--recipe", str(run / "config.yaml"), "--epochs", "1ba"]) == 0
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["tiny-TinyNet-data", "tiny-TinyNet-data-2"]


def test_resume_of_a_finished_run_changes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = load_file(run / "weights.safetensors")
    assert main(["train", str(run), "--resume"]) == 0
    assert "going on after 16 of 16" in capsys.readouterr().out
    after = load_file(run / "weights.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_eval_gives_what_the_run_measured(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    summary = json.loads((run / "summary.json").read_text())
    assert (row["top1"], row["images"]) == (summary["top1"], 40)
    assert row["loss"] == pytest.approx(summary["loss"], rel=1e-6)
    assert main(["eval", str(run)]) == 0
    assert "%" in capsys.readouterr().out


def test_eval_shows_what_it_found_where_the_run_cannot_be_written_to(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(run, tmp_path / "other", ignore=shutil.ignore_patterns("mistakes"))
    (other / "mistakes").write_text("a file in the way")
    before = (other / "evaluation.json").read_bytes()
    assert main(["eval", str(other), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)[0]["images"] == 40
    assert said.err == f"{other} cannot be written to (File exists): its confusion matrix stays as it was\n"
    assert (other / "evaluation.json").read_bytes() == before


def test_eval_prepares_other_data_as_the_run_did(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = f"--data {run.parent / 'data'} --batch 24 --epochs 1ba --set data.mean=[0.9] --set data.std=[0.1]"
    assert main(f"train tiny:TinyNet {settings} --out {tmp_path / 'run'}".split()) == 0
    loss = json.loads((tmp_path / "run" / "summary.json").read_text())["loss"]
    copy = shutil.copytree(run.parent / "data", tmp_path / "copy")
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--data", str(copy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["loss"] == pytest.approx(loss, rel=1e-6)
    with_own_statistics = restore(tmp_path / "run")
    object.__setattr__(with_own_statistics.data, "mean", (0.1,))
    assert with_own_statistics.evaluate(torch.device("cpu")).loss != pytest.approx(loss, rel=1e-6)


def test_export_to_onnx_runs_elsewhere(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    assert main(["export", str(run), "--onnx"]) == 0
    session = onnxruntime.InferenceSession(str(run / "model.onnx"), providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"])[3] == "3"
    model = TinyNet().eval()
    model.load_state_dict(load_file(run / "weights.safetensors"))
    images = torch.randn(5, 1, 28, 28)
    with torch.no_grad():
        wanted = model(images)
    given = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    assert torch.allclose(given, wanted, atol=1e-4)


def test_models_recipes_and_data_are_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "resnet50", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["parameters"] for row in rows}["resnet50"] == 25_557_032
    assert main(["recipes"]) == 0
    assert "imagenet-90" in capsys.readouterr().out
    assert main(["recipes", "imagenet-90"]) == 0
    assert "resnet50" in capsys.readouterr().out
    assert main(["recipes", "--keys", "--json"]) == 0
    keys = {row["key"]: row["default"] for row in json.loads(capsys.readouterr().out)}
    assert (keys["microbatch"], keys["optimizer.lr (lamb)"], keys["data.augment.crop"]) == ("32", "null", "none")
    assert main(["data", str(run.parent / "data"), "--check", "--json"]) == 0
    assert [row["images"] for row in json.loads(capsys.readouterr().out)] == [96, 40]
