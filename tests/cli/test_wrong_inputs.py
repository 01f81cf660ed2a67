"""Every mistake of the user: exit status 2, one sentence that names what to change, and nothing left on disk."""

import gzip
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from convoy.cli import main
from convoy.progress import ConsoleReporter
from convoy.training import load_recipe, train
from tiny import TinyNet, write_mnist

LENET = "train lenet --data {data} --batch 24"
TINY = "train tiny:TinyNet --data {data} --batch 24"

OPTIONS = {
    "a number of devices": ("train lenet --device 2", "--devices 2 for so many"),
    "unknown verb": ("trian lenet", "no such command 'trian': did you mean train?"),
    "unknown option": (f"{LENET} --epoch 5", "--epochs"),
    "option without value": (f"{LENET} --batch", "--batch"),
    "text for a number": (f"{LENET} --batch many", "'many' is not a valid integer"),
    "nothing to train": ("train --data {data}", "give a MODEL"),
    "unknown model": ("train resnet51 --data {data} --batch 24", "resnet50"),
    "factory of no module": ("train nowhere:Net --data {data} --batch 24", "nowhere"),
    "factory that is missing": ("train tiny:Nothing --data {data} --batch 24", "Nothing"),
    "model without logits": ("train tiny:Unfit --data {data} --batch 24", "logits"),
    "model too large for the images": ("train alexnet --data {data} --batch 24", "1×28×28"),
    "unknown recipe": ("train --recipe lenet-minst --data {data}", "lenet-mnist"),
    "recipe file that is missing": ("train --recipe {tmp}/none.yaml", "none.yaml"),
    "unknown key": (f"{LENET} --set optimizer.momentun=0.9", "momentum"),
    "setting without value": (f"{LENET} --set optimizer.lr", "key=value"),
    "the same key twice": (f"{LENET} --lr 0.1 --set optimizer.lr=0.2", "optimizer.lr"),
    "negative learning rate": (f"{LENET} --lr -1", "optimizer.lr"),
    "no epochs": (f"{LENET} --epochs 0", "epochs"),
    "epochs in a wrong unit": (f"{LENET} --epochs 5min", "5000ba"),
    "batch of nothing": (f"{LENET} --batch 0", "batch"),
    "batch larger than the data": (f"{LENET} --batch 1000", "96"),
    "more microbatches than samples": (f"{LENET} --batch 8 --microbatches 9", "microbatches"),
    "unknown batch norm": (f"{LENET} --batch-norm global", "microbatch"),
    "unknown precision": (f"{LENET} --precision fp8", "bf16"),
    "unknown schedule": (
        f"{LENET} --schedule pipedream",
        "must be 1f1b, gpipe or zero-bubble",
    ),
    "memory limit that is no size": (f"{LENET} --memory-limit much", "--memory-limit: 'much' is no size"),
    "unknown device": (f"{LENET} --device tpu", "cpu"),
    "a GPU that is not here": (f"{LENET} --device cuda:99", "cpu"),
    "momentum with adamw": (
        f"{LENET} --set optimizer.name=adamw --set optimizer.lr=0.1 --set optimizer.momentum=0.9",
        "momentum",
    ),
    "milestones with cosine": (f"{LENET} --set schedule.milestones=[1ep]", "milestones"),
    "warm-up longer than the training": (f"{LENET} --epochs 2 --set schedule.warmup=3ep", "warmup"),
    "negative workers": (f"{LENET} --workers -1", "data.workers"),
    "unknown way with bad images": (f"{LENET} --bad-images ignore", "skip"),
    "reproducible with sync": (f"{LENET} --reproducible --batch-norm sync", "batch_norm"),
    "a name that is too long": ("train lenet --data " + "x" * 300, "too long"),
    "an empty name": ("data ", "PATH"),
    "option of another model": (f"{LENET} --set model.options.dropout=0.5", "dropout"),
}

DATA = {
    "no such data": ("train lenet --data {tmp}/nowhere", "nowhere"),
    "empty folder": ("train lenet --data {tmp}/empty", "empty"),
    "truncated gzip": ("train lenet --data {tmp}/truncated", "images-idx3-ubyte"),
    "wrong magic number": ("train lenet --data {tmp}/magic", "idx"),
    "labels that do not match": ("train lenet --data {tmp}/short", "labels"),
    "one class only": ("train lenet --data {tmp}/one-class", "class"),
    "a picture cut off": ("train lenet --data {tmp}/photos --set data.image_size=32 --epochs 1", "cut.png"),
    "a file that is no data": ("train lenet --data {tmp}/text.txt", "text.txt"),
    "data of another kind": ("train lenet --data {data} --set data.format=parquet", "parquet"),
    "check of no data": ("data {tmp}/nowhere", "nowhere"),
}

RECIPES = {
    "broken YAML": ("train --recipe {tmp}/broken.yaml --data {data}", "broken.yaml, line 3"),
    "a list as a recipe": ("train --recipe {tmp}/list.yaml --data {data}", "list.yaml"),
    "a word for a number": ("train --recipe {tmp}/word.yaml --data {data}", "batch"),
    "words for a length": ("train --recipe {tmp}/length.yaml --data {data}", "or weight updates as 5000ba\n"),
    "an unknown section": ("train --recipe {tmp}/section.yaml --data {data}", "optimizer"),
    "a folder as a recipe": ("train --recipe {tmp} --data {data}", "folder"),
}

WEIGHTS = {
    "no such weights": (f"{TINY} --weights {{tmp}}/none.pth", "none.pth"),
    "weights of another network": (f"{LENET} --weights {{tmp}}/tiny.safetensors", "tiny.safetensors"),
    "weights cut off": (f"{TINY} --weights {{tmp}}/cut.safetensors", "cut.safetensors"),
    "weights that run code": (f"{TINY} --weights {{tmp}}/evil.pth", "evil.pth"),
    "weights in an unknown format": (f"{TINY} --weights {{tmp}}/text.txt", "it is not what torch.save writes"),
    "weights of a run that has none": (f"{TINY} --weights {{unfinished}}", "--resume"),
}

RUNS = {
    "out holds a run": (f"{TINY} --out {{run}}", "is finished: choose another --out"),
    "out is not empty": (f"{TINY} --out {{tmp}}/magic", "not empty"),
    "out is a file": (f"{TINY} --out {{tmp}}/text.txt", "is a file"),
    "out below a file": (f"{TINY} --out {{tmp}}/text.txt/run", "--out"),
    "resume of nothing": ("train --resume --out {tmp}/nowhere", "nowhere"),
    "resume without a run": ("train tiny:TinyNet --resume", "--resume"),
    "resume with another seed": ("train {run} --resume --seed 5 --trust-code", "seed"),
    "every checkpoint damaged": ("train {damaged} --resume --trust-code", "step-"),
    "config damaged": ("train {tmp}/bad-config --resume", "config.yaml"),
    "eval of no run": ("eval {tmp}/empty", "config.yaml"),
    "eval of an unfinished run": ("eval {unfinished}", "weights.safetensors"),
    "eval of damaged weights": ("eval {cut_weights} --trust-code", "weights.safetensors"),
    "eval on missing data": ("eval {run} --data {tmp}/nowhere", "nowhere"),
    "report of no run": ("report {tmp}/empty", "empty"),
    "report of half a study": ("report {tmp}/study", "it has no study"),
    "report of damaged metrics": ("report {bad_metrics}", "metrics.jsonl"),
    "eval in two forms": ("eval {run} --json --csv", "give one of them"),
    "export in two formats": ("export {run} --onnx --torch-export", "write one after the other"),
    "export by an unknown ending": ("export {run} --to {tmp}/x.bin", "end it in .onnx or .pt2"),
    "export to a file of another format": ("export {run} --onnx --to {tmp}/x.pt2", ".onnx"),
    "export to a file of yet another": ("export {run} --torch-export --to {tmp}/x.onnx", ".pt2"),
    "predict by no run": ("predict {tmp}/empty {tmp}/photos", "config.yaml"),
    "predict by an unfinished run": ("predict {unfinished} {tmp}/photos", "weights.safetensors"),
    "predict nothing": ("predict {run}", "PICTURE"),
    "predict a picture that is not there": ("predict {run} {tmp}/none.png", "none.png: check the path"),
    "predict an empty folder": ("predict {run} {tmp}/empty --trust-code", "holds no pictures"),
    "predict on no device": ("predict {run} {tmp}/photos --devices 0", "--devices 0"),
    "export to no folder": ("export {run} --onnx --to {tmp}/nowhere/x.onnx --trust-code", "nowhere"),
    "models that do not exist": ("models rezznet", "rezznet"),
    "recipe that does not exist": ("recipes imagnet-90", "imagenet-90"),
}

CASES = OPTIONS | DATA | RECIPES | WEIGHTS | RUNS


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tmp = tmp_path_factory.mktemp("wrong")
    data = write_mnist(tmp / "data")
    (tmp / "empty").mkdir()
    (tmp / "text.txt").write_text("hello")
    truncated = shutil.copytree(data, tmp / "truncated")
    images = truncated / "train-images-idx3-ubyte"
    (truncated / f"{images.name}.gz").write_bytes(gzip.compress(images.read_bytes())[:-500])
    images.unlink()
    magic = shutil.copytree(data, tmp / "magic")
    (magic / images.name).write_bytes(b"\0\0\x0d\x03" + (magic / images.name).read_bytes()[4:])
    short = shutil.copytree(data, tmp / "short")
    labels = short / "train-labels-idx1-ubyte"
    labels.write_bytes(np.array([2049, 50], ">i4").tobytes() + labels.read_bytes()[8:58])
    for folder in ("one-class/a", "photos/a", "photos/b"):
        (tmp / folder).mkdir(parents=True)
        for index in range(80):
            Image.new("L", (40, 36), index).save(tmp / folder / f"{index}.png")
    whole = (tmp / "photos" / "a" / "0.png").read_bytes()
    for name in ("a", "b"):
        for index in range(80):
            (tmp / "photos" / name / f"{index}-cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp / "broken.yaml").write_text("batch: 4\nmodel: [\n")
    (tmp / "list.yaml").write_text("- 1\n")
    (tmp / "word.yaml").write_text("model: {name: lenet}\nbatch: many\n")
    (tmp / "length.yaml").write_text("model: {name: lenet}\nepochs: 10 epochs\n")
    (tmp / "section.yaml").write_text("model: {name: lenet}\noptimizer: {lr: 1}\n")
    save_file(TinyNet().state_dict(), tmp / "tiny.safetensors")
    (tmp / "cut.safetensors").write_bytes((tmp / "tiny.safetensors").read_bytes()[:-9])
    torch.save({"weight": os.system}, tmp / "evil.pth")
    (tmp / "study").mkdir()
    (tmp / "study" / "bench.json").write_text('{"format": "convoy-bench", "schema": 1}')
    run = tmp / "run"
    settings = ["model.name=tiny:TinyNet", f"data.path={data}", "epochs=1ep", "batch=24", "threads=1"]
    train(load_recipe("default", settings), run, reporter=ConsoleReporter())
    places = {"tmp": tmp, "data": data, "run": run}
    for name in ("damaged", "unfinished", "cut_weights", "bad_metrics"):
        places[name] = shutil.copytree(run, tmp / name)
    for state in (places["damaged"] / "checkpoints").glob("*/state/*.safetensors"):
        state.write_bytes(b"")
    (places["unfinished"] / "weights.safetensors").unlink()
    weights = places["cut_weights"] / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    (places["bad_metrics"] / "metrics.jsonl").write_text('{"split": "train"\n{}\n')
    bad_config = shutil.copytree(run, tmp / "bad-config") / "config.yaml"
    bad_config.write_text("model: {name: lenet\n")
    return places


def listing(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in sorted(folder.rglob("*"))}


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize("case", CASES)
def test_wrong_input(
    case: str,
    places: dict[str, Path],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, word = CASES[case]
    monkeypatch.chdir(tmp_path)
    before = listing(places["tmp"])
    capfd.readouterr()
    status = main(line.format(**places).split())
    output = capfd.readouterr()
    assert status == 2, output
    assert output.err.startswith("convoy: ")
    assert output.err.count("\n") == 1, "one sentence, one line"
    assert word in output.err
    assert "Traceback" not in output.err
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    if case != "a picture cut off":  # found out while training: the run directory stays, to be resumed
        assert not left
        assert listing(places["tmp"]) == before


def test_right_input_has_status_0(places: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(places["run"]), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)[0]["images"] == 40


def test_an_error_of_ours_has_status_1(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("convoy.cli.models.options.show", fail)
    assert main(["models", "lenet"]) == 1
    assert "RuntimeError: broken" in capfd.readouterr().err
    assert main(["models", "lenet", "-v"]) == 1
    assert "Traceback" in capfd.readouterr().err


def test_a_mistyped_option_is_asked_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "lenet", "--deivces", "2"]) == 2
    said = capsys.readouterr().err
    assert said == "convoy: no such option --deivces: did you mean --device or --devices? see convoy train --help\n"
