"""Mistakes of the user: status 2, one sentence that names what to change, and nothing left on disk; before torch is
loaded where that can be, and before anything costly is begun. Other lines are in `tests/frozen/refused.txt`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cli.calls import Call, faults
from convoy.cli.app import VERBS
from convoy.cli.launch import LAUNCHERS
from data.made import write_folder
from started import ENVIRONMENT

HELP = ["--help", *(f"{verb} --help" for verb in VERBS), *(f"launch {name} --help" for name in LAUNCHERS)]
LENET = "train lenet --data mnist-mini"
WITHOUT_TORCH = {
    "train lenet --deivces 2": "no such option --deivces: did you mean --device or --devices? see convoy train --help",
    f"{LENET} --plan smaple=2": "smaple is no strategy: did you mean sample?",
    f"{LENET} --plan sample=3 --devices 2": "start it with --devices 3",
    f"{LENET} --plan auto --devices 2 --shares 1,2,3": "no plan on 2 devices divides it",
    f"{LENET} --out .": "is not empty",
    f"{LENET} --out file/run --devices 2": "cannot write to",
    "train mine:net:work.py --data mnist-mini --set batch=x": "batch is x",
    "train none --extend 8": "none holds no run, which --extend 8ep needs",
    "train runs/frist --resume": "did you mean runs/first?",
    "export runs/none --to x.bin": "end it in .onnx or .pt2",
    "predict none missing.png": "there is no picture or folder missing.png",
    "data pack none packed": "data set none does not exist",
    "doctor train lenet --data missing --verify": "data set missing does not exist",
    "plan lenet --fix fc1": "'fc1' fixes nothing",
    "plan lenet --score sample=2 --score sample=3": "--score sample=3 is for 3 devices, but --score sample=2 for 2",
    "plan lenet --out file/plan.yaml": "--out file/plan.yaml cannot be written",
    "bench lenet --plans sample=3 --devices 1,2": "--devices has no 3",
}
CODE = """
import contextlib, io, json, sys
from convoy.cli import main
answers = []
for line in json.load(sys.stdin):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        status = main(line.split())
    answers.append((status, text.getvalue(), "torch" in sys.modules))
json.dump(answers, sys.stdout)
"""
BEFORE_ANYTHING_COSTLY = {
    "train lenet --data two.yaml --plan filter=20": "only 6 output channels for the 20 ranks",
    "train resnet18 --data two.yaml --devices 2 --batch 32": "is 1 microbatch, and 2 devices need 2: add --micro",
    "train lenet --data two.yaml --devices 2 --out .": "is not empty",
    "bench lenet --data nowhere --emulate two.yaml --shares half": "--shares half",
}
TRAINING = {
    "train tiny:Unfit --data {data} --batch 24": "logits",
    "train alexnet --data {data} --batch 24": "1×28×28",
    "train --recipe {tmp}/broken.yaml --data {data}": "broken.yaml, line 3",
    "train lenet --data {data} --batch 24 --weights {tmp}/evil.pth": "evil.pth",
    "doctor {run} --bacth 3": "did you mean --batch",
}
RUNS = {
    "train tiny:TinyNet --data {data} --batch 24 --out {run}": "is finished: choose another --out",
    "train {damaged} --resume --trust-code": "step-",
    "eval {damaged} --trust-code": "weights.safetensors",
    "report {damaged}": "metrics.jsonl",
    "export {run} --onnx --to {tmp}/x.pt2": ".onnx",
}
PLANS = {
    "plan lenet --devices 4 --batch 2": "too small for 4 devices",
    "plan lenet --devices 16 --batch 16 --microbatches 16 --score filter=16 --link pcie4": "6",
    "plan lenet --devices 2 --memory-limit 1kB --batch 32 --link pcie4": "no plan fits",
    "plan lenet --devices 2 --batch 32 --link pcie4 --images-per-second nan": "--images-per-second is nan",
    "plan lenet --batch 80 --devices 40 --link 10gbit --score stage=40": "--score stage=40: the network has ",
    "plan lenet --on 2xt4 --devices 2": "--devices is for devices at hand",
    "plan lenet --score sample=2 --schedule gpipe": "--schedule is for plans with stages, and --score names none",
    "plan lenet --between 10gbit": "name one with --on",
    "plan lenet --on 2xt4 --recompute": "--recompute is not for --on",
}
STUDIES_AND_DATA = {
    "bench lenet --devices 4096": "--devices 4096 needs 4096 cores",
    "bench lenet --devices 1 --set precision=auto": "precision=auto may differ from row to row: name one for all",
    "bench lenet --devices 1 --shares 1,0": "--shares 1,0 are no shares",
    "bench lenet --devices 1 --train-epochs 1 --data mnist-mini --batch-per-device 8": "give --batch",
    "data pack photos packed --raw --quality 80": "--quality is of JPEG, and --raw stores none",
    "data pack empty packed": "empty is an empty folder: set SOURCE to where the data is",
    "data /nowhere": "data set /nowhere does not exist: set PATH to a file or folder, or to mnist-mini",
    "data verify /nowhere": "/nowhere does not exist: name a folder that convoy data pack has written",
    "data pack photos photos/packed": "lies in the data set itself",
}
TABLES = {"training": TRAINING, "runs": RUNS, "plans": PLANS, "studies and data": STUDIES_AND_DATA}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that lines are typed in."""
    here = tmp_path / "here"
    for name in ("runs/first", "runs/second", "empty"):
        (here / name).mkdir(parents=True)
    (here / "file").write_text("")
    (here / "two.yaml").write_text("devices: {count: 2, speed: 0.5}\nlinks: {rate: 1gbit}\n")
    (here / "runs" / "first" / "config.yaml").write_text("")
    monkeypatch.chdir(here)
    return here


@pytest.fixture
def places(data: Path, run: Path, folder: Path) -> dict[str, Path]:
    write_folder(folder / "photos" / "train", num=2, width=12, height=12)
    tmp = folder.parent
    folders = {"tmp": tmp, "data": data, "run": run}
    folders["damaged"] = shutil.copytree(run, tmp / "damaged")
    for state in (folders["damaged"] / "checkpoints").glob("*/state/*.safetensors"):
        state.write_bytes(b"")
    weights = folders["damaged"] / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    (folders["damaged"] / "metrics.jsonl").write_text('{"split": "train"\n{}\n')
    (tmp / "broken.yaml").write_text("batch: 4\nmodel: [\n")
    torch.save({"weight": os.system}, tmp / "evil.pth")
    return folders


def contents(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("name", TABLES)
def test_a_mistake_is_one_sentence_and_leaves_nothing(name: str, places: dict[str, Path], call: Call) -> None:
    before = contents(places["tmp"])
    assert faults(call, TABLES[name], **places) == []
    assert contents(places["tmp"]) == before


def test_help_and_mistakes_do_not_wait_for_torch(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    lines = [*HELP, *WITHOUT_TORCH, "plan lenet --fix fc=filter"]
    words = [sys.executable, "-c", CODE]
    done = subprocess.run(words, input=json.dumps(lines), env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    *answers, (status, sentence, has_torch) = json.loads(done.stdout)
    for line, answer in zip(lines, answers, strict=False):
        expected = (0, False) if line in HELP else (2, False)
        assert (answer[0], answer[2]) == expected, (line, answer)
        assert line in HELP or (answer[1].count("\n") == 1 and WITHOUT_TORCH[line] in answer[1]), (line, answer)
    assert status == 2 and "matches no layer" in sentence and "measuring" not in sentence
    assert has_torch, "the negative control: what needs the network loads torch"
    assert sorted(folder.rglob("*")) == before


@pytest.mark.usefixtures("folder")
def test_what_the_network_shows_is_refused_before_anything_costly_is_begun(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def costly(*_: object, **__: object) -> None:
        raise AssertionError("something costly was begun")

    for name in ("launch.start", "training.set_up.open_data", "bench.command.open_data", "bench.command.emulate"):
        monkeypatch.setattr(f"convoy.{name}", costly)
    assert faults(call, BEFORE_ANYTHING_COSTLY) == []
    for name in ("check_run", "check_devices"):  # the negative control
        monkeypatch.setattr(f"convoy.cli.train_run.{name}", lambda *_: None)
    monkeypatch.setattr("convoy.cli.requests.TrainRequest.check", lambda _: None)
    assert "something costly was begun" in call("train lenet --data two.yaml --devices 2 --out .", status=1).err


def test_an_error_of_the_program_has_status_1_and_shows_its_traceback_to_who_asks(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("convoy.cli.models.options.show", fail)
    assert "RuntimeError: broken" in (brief := call("models lenet", status=1).err) and "Traceback" not in brief
    assert "Traceback" in call("models lenet -v", status=1).err
