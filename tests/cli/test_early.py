"""What can be refused at once is: before torch is loaded, ranks are started, data are opened or clusters emulated."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.calls import Call, faults
from convoy.cli.app import VERBS
from convoy.cli.launch import LAUNCHERS

HELP = ["--help", *(f"{verb} --help" for verb in VERBS), *(f"launch {name} --help" for name in LAUNCHERS)]
LENET = "train lenet --data mnist-mini"
WITHOUT_TORCH = {
    "train lenet --nonsense": "no such option",
    "train lenet --deivces 2": "no such option --deivces: did you mean --device or --devices? see convoy train --help",
    "train lenet --data missing": "data set missing does not exist",
    f"{LENET} --plan smaple=2": "smaple is no strategy",
    f"{LENET} --plan sample=3 --devices 2": "is for 3 devices, but 2 run",
    f"{LENET} --plan auto --devices 2 --shares 1,2,3": "no plan on 2 devices divides it",
    f"{LENET} --plan sample=2,filter=2 --shares 1,1,1,1": "into 2: give 2 numbers",
    f"{LENET} --out .": "is not empty",
    f"{LENET} --out file": "is a file",
    f"{LENET} --out file/run --devices 2": "cannot write to",
    f"{LENET} --recipe none/such.yaml": "there is no recipe file none/such.yaml",
    f"{LENET} --weights none.pth": "weights file none.pth does not exist",
    "train mine:net:work.py --data mnist-mini --set batch=x": "batch is x",
    "train no/such:net --data mnist-mini": "names no module",
    "train none --extend 8": "none is no run directory: --extend needs the run to make longer",
    "train --resume --out none": "holds no run to go on with",
    "train runs/frist --resume": "did you mean runs/first?",
    "train runs/second --resume": "nothing was trained in runs/second yet",
    "train runs/other --resume": "start it anew, without --resume",
    "export runs/none --to x.bin": "end it in .onnx or .pt2",
    "predict none file": "none is no run directory",
    "predict none missing.png": "there is no picture or folder missing.png",
    "eval none --json --csv": "give one of them",
    "report none": "none is no run directory",
    "data pack none packed": "data set none does not exist",
    "doctor none": "none is no run directory: name one, or write convoy doctor train MODEL",
    "doctor train lenet --data missing --verify": "data set missing does not exist",
    "doctor train lenet --seconds nan": "--seconds nan is no time",
    "plan": "nothing to plan",
    "plan lenet --fix fc1": "'fc1' fixes nothing",
    "plan lenet --fix fc1=fitler": "fitler is no strategy",
    "plan lenet --score sample=2 --score sample=3": "--score sample=3 is for 3 devices, but --score sample=2 for 2",
    "plan lenet --score sample=2 --fix *=filter": "--fix is for a search",
    "plan lenet --out file/plan.yaml": "--out file/plan.yaml cannot be written",
    "bench lenet --set batches=3": "batches is unknown",
    "bench lenet --plans sample=3 --devices 1,2": "--devices has no 3",
    "bench lenet --emulate two.yaml --devices 3": "the cluster of --emulate has 2",
    "bench lenet --out file/study": "--out file/study cannot be written",
    "launch hosts a:1,b:1 -- lenet --batch many": "is not a valid integer",
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
WITH_THE_NETWORK = {
    "train lenet --data two.yaml --plan filter=20": "only 6 output channels for the 20 ranks",
    "train lenet --data two.yaml --plan plan.yaml": "did you mean features.*?",
    "train lenet --data two.yaml --devices 2 --batch 32 --reproducible": "add --microbatches 2",
    "train resnet18 --data two.yaml --devices 2 --batch 32": "is 1 microbatch, and 2 devices need 2: add --micro",
    "train lenet --data two.yaml --devices 2 --out .": "is not empty",
    "train lenet --data two.yaml --devices 64 --batch 32": "cannot be divided over 64 devices",
    "bench lenet --data nowhere --emulate two.yaml --shares half": "--shares half",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "plan.yaml").write_text("mesh: {a: 2}\nlayers: {feature.*: {a: filter}}\n")
    (tmp_path / "two.yaml").write_text("devices: {count: 2, speed: 0.5}\nlinks: {rate: 1gbit}\n")
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").write_text("")
    return tmp_path


def test_help_and_mistakes_do_not_wait_for_torch(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    lines = [*HELP, *WITHOUT_TORCH, "plan lenet --fix fc=filter"]
    done = subprocess.run(
        [sys.executable, "-c", CODE], input=json.dumps(lines), capture_output=True, text=True, timeout=100, check=True
    )
    *answers, (status, sentence, has_torch) = json.loads(done.stdout)
    assert [(status, has_torch) for status, _, has_torch in answers[: len(HELP)]] == [(0, False)] * len(HELP)
    for answer, line in zip(answers[len(HELP) :], WITHOUT_TORCH, strict=True):
        assert (answer[0], answer[2], answer[1].count("\n")) == (2, False, 1), (line, answer)
        assert WITHOUT_TORCH[line] in answer[1], (line, answer)
    assert status == 2 and "matches no layer" in sentence and "measuring" not in sentence
    assert has_torch, "the negative control: what needs the network loads torch"
    assert sorted(folder.rglob("*")) == before


@pytest.fixture
def nothing_costly(monkeypatch: pytest.MonkeyPatch) -> None:
    def costly(*_: object, **__: object) -> None:
        raise AssertionError("something costly was begun")

    for name in ("launch.start", "training.set_up.open_data", "bench.command.open_data", "bench.command.emulate"):
        monkeypatch.setattr(f"convoy.{name}", costly)


@pytest.mark.usefixtures("folder", "nothing_costly")
def test_what_the_network_shows_is_refused_before_anything_costly_is_begun(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert faults(call, WITH_THE_NETWORK) == []
    for name in ("check_run", "check_devices"):  # the negative control
        monkeypatch.setattr(f"convoy.cli.train_run.{name}", lambda *_: None)
    monkeypatch.setattr("convoy.cli.requests.TrainRequest.check", lambda _: None)
    assert "something costly was begun" in call("train lenet --data two.yaml --devices 2 --out .", status=1).err
