"""The verbs, as a person calls them."""

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from convoy.cli import main
from convoy.cli.app import VERBS
from convoy.training.restore import evaluate_run, evaluation_data, load_run
from tiny import TinyNet, write_mnist, write_pictures


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
    line = f"train --recipe {run / 'config.yaml'} --out {again} -v"
    assert main(line.split()) == 0
    output = capsys.readouterr().out
    assert "peak learning rate" in output
    assert "optimizer.lr as said" in output
    assert "test accuracy" in output
    assert f"report: {again / 'report.html'}" in output
    assert (again / "report.html").exists()


def test_a_run_begins_with_three_lines(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run.parent / "short"
    assert main(["train", "--recipe", str(run / "config.yaml"), "--out", str(out), "--epochs", "1ba"]) == 0
    first, second, third, *rest = capsys.readouterr().out.splitlines()
    assert first == "tiny:TinyNet on mnist: 96 training and 40 test images of 1×28×28, 10 classes"
    assert second == "on one device (cpu): 1 update of 24 images, learning rate up to 0.05"
    assert third.startswith(f"in {out}; ")
    assert not any("=" in line.partition("(")[0] for line in rest)
    derived = {row["name"] for row in json.loads((out / "summary.json").read_text())["derived"]}
    assert {"peak learning rate", "microbatches", "data workers"} <= derived  # which the report shows


@pytest.mark.slow
def test_the_default_folder_is_never_one_that_exists(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(["train", "--recipe", str(run / "config.yaml"), "--epochs", "1ba", "--trust-code"]) == 0
    said = capsys.readouterr().out
    assert "update 1 of 1: test top-1" in said and "epoch 0.25" not in said  # as the length was given
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["tiny-TinyNet-data", "tiny-TinyNet-data-2"]


@pytest.mark.slow
def test_resume_of_a_finished_run_changes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = load_file(run / "weights.safetensors")
    files = ("summary.json", "evaluation.json", "environment.json", "metrics.jsonl", "plan.yaml", "report.html")
    contents = {name: (run / name).read_bytes() for name in files}
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").read_bytes() == contents["report.html"]
    assert main(["train", str(run), "--resume"]) == 0
    assert {name: (run / name).read_bytes() for name in files} == contents
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
    trained = load_run(tmp_path / "run")
    data, _ = evaluation_data(trained)
    object.__setattr__(data, "mean", (0.1,))
    assert evaluate_run(trained, data, torch.device("cpu")).loss != pytest.approx(loss, rel=1e-6)


@pytest.mark.slow
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


@pytest.mark.slow
def test_export_to_torch_runs_in_plain_torch(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = TinyNet().eval()
    model.load_state_dict(load_file(run / "weights.safetensors"))
    images = torch.randn(5, 1, 28, 28)
    assert main(["export", str(run), "--torch-export"]) == 0
    assert main(["export", str(run), "--to", str(tmp_path / "x.pt2")]) == 0
    assert f"wrote {tmp_path / 'x.pt2'}; torch.export.load's outputs differ" in capsys.readouterr().out
    for path in (run / "model.pt2", tmp_path / "x.pt2"):
        notes = {"convoy.json": ""}
        program = torch.export.load(path, extra_files=notes).module()
        with torch.no_grad():
            assert torch.allclose(program(images), model(images), atol=1e-6)
        assert json.loads(notes["convoy.json"])["classes"][3] == "3"


def test_export_writes_onnx_unless_said_otherwise(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forms = []
    monkeypatch.setattr("convoy.training.export.export", lambda run, form, path: forms.append((form, path)) or 0)
    assert main(["export", str(run)]) == 0
    assert main(["export", str(run), "--to", "x.onnx"]) == 0
    assert forms == [("onnx", run / "model.onnx"), ("onnx", Path("x.onnx"))]


def test_eval_shows_every_class(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--per-class", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    confusion = torch.tensor(json.loads((run / "evaluation.json").read_text())["confusion"])
    assert [each["class"] for each in row["classes"]] == [str(number) for number in range(10)]
    for number, each in enumerate(row["classes"]):
        right, true, taken = confusion[number, number].item(), *(confusion.sum(d)[number].item() for d in (1, 0))
        assert each["samples"] == true == 4 and each["recall"] == right / true
        assert each["precision"] == (right / taken if taken else None)
    assert main(["eval", str(run), "--per-class", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [float(each["recall"]) for each in rows] == [each["recall"] for each in row["classes"]]
    assert main(["eval", str(run), "--csv"]) == 0
    assert float(next(csv.DictReader(io.StringIO(capsys.readouterr().out)))["top1"]) == row["top1"]
    assert main(["eval", str(run), "--per-class"]) == 0
    assert "precision" in capsys.readouterr().out


def test_keys_of_recipes_are_a_line_each(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["recipes", "--keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.count("\t") for line in lines} == {3}
    (line,) = (line for line in lines if line.startswith("data.augment.crop\t"))
    assert line.split("\t")[1:3] == ["none | pad | random-resized", "none"]
    assert [line.split("\t")[1:3] for line in lines if line.startswith("batch\t")] == [["int", "128"]]
    assert [line.split("\t")[1] for line in lines if line.startswith("data.mean\t")] == ["list of float | null"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["recipes", "--keys"]) == 0
    read = capsys.readouterr().out
    assert max(map(len, (line for line in read.splitlines() if line.startswith(" ")))) <= 60
    assert "torchvision:NAME" in read  # no word is torn


def test_data_says_the_format_and_check_names_every_bad_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for size, name in ((20, "small"), (90, "large")):
        data = write_pictures(tmp_path / name, size=(size, size)) / "train"
        whole = (data / "a" / "0.png").read_bytes()
        for place in ("a/0.png", "b/3.png", "c/7.png"):
            (data / place).write_bytes(whole[:90])
        (data / "c" / "x.png").write_text("")
        assert main(["data", str(data), "--json"]) == 0
        said = capsys.readouterr()
        assert {row["format"] for row in json.loads(said.out)} == {"folder"}
        split, *others = said.err.splitlines()
        assert "train has no split of its own: 2 of its 25 samples are held out" in split
        assert others == (["4 of the pictures cannot be read: --check names them"] if name == "small" else [])
        assert main(["data", str(data), "--check", "--json"]) == 1
        said = capsys.readouterr()
        assert sum(row["not readable"] for row in json.loads(said.out)) == 4
        named = sorted(line.partition(" ")[0] for line in said.err.splitlines()[1:])
        assert named == ["a/0.png", "b/3.png", "c/7.png", "c/x.png"]


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
