"""What needs no torch does not wait for it: help, and mistakes that the command line alone shows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from convoy.cli.app import VERBS
from convoy.cli.launch import LAUNCHERS

HELP = ["--help", *(f"{verb} --help" for verb in VERBS), *(f"launch {name} --help" for name in LAUNCHERS)]
WRONG = {
    "train lenet --nonsense": "no such option",
    "train lenet --batch many": "is not a valid integer",
    "train lenet --data missing": "data set missing does not exist",
    "train lenet --data mnist-mini --plan smaple=2": "smaple is no strategy",
    "export runs/none --to x.bin": "end it in .onnx or .pt2",
    "predict runs/none missing.png": "there is no picture or folder missing.png",
    "eval runs/none --json --csv": "give one of them",
    "train lenett --data mnist-mini": "did you mean lenet",
    "train mine:net:work.py --data mnist-mini --set batch=x": "batch is x",
    "train no/such:net --data mnist-mini": "names no module",
    "train lenet --data mnist-mini --recipe defualt": "did you mean default",
    "train lenet --data mnist-mini --recipe none/such.yaml": "there is no recipe file none/such.yaml",
    "train lenet --data mnist-mini --set optimizer.momentun=0.8": "did you mean optimizer.momentum",
    "train lenet --data mnist-mini --weights none.pth": "weights file none.pth does not exist",
    "train lenet --data mnist-mini --plan sample=3 --devices 2": "is for 3 devices, but 2 run",
    "train lenet --data mnist-mini --plan auto --devices 2 --shares 1,2,3": "no plan on 2 devices divides it",
    "train lenet --data mnist-mini --plan sample=2 --devices 2 --shares 1,2,3": "into 2: give 2 numbers",
    "train lenet --data mnist-mini --out .": "is not empty",
    "train lenet --data mnist-mini --out file": "is a file",
    "train none --extend 8": "none is no run directory: --extend needs the run to make longer",
    "train --resume --out none": "holds no run to go on with",
    "export runs/none": "is no run directory",
    "eval none": "none is no run directory",
    "predict none file": "none is no run directory",
    "data none": "data set none does not exist",
    "data pack none packed": "data set none does not exist",
    "data verify none": "data set none does not exist",
    "report none": "none is no run directory",
    "doctor none": "none is no run directory: name one, or write convoy doctor train MODEL",
    "doctor --verfy train lenet": "did you mean --verify",
    "doctor train lenett": "did you mean lenet",
    "doctor train lenet --nonsense": "no such option",
    "doctor train lenet --data mnist-mini --out x": "--out is for a run",
    "doctor train lenet --data missing --verify": "data set missing does not exist",
    "doctor train lenet --seconds -1": "-1",
    "doctor train lenet --seconds nan": "--seconds nan is no time",
    "plan lenett": "did you mean lenet",
    "plan lenet --recipe defualt": "did you mean default",
    "plan lenet --fix fc1": "'fc1' fixes nothing",
    "plan lenet --fix fc1=fitler": "fitler is no strategy",
    "plan lenet --devices 2 --shares 1,2,3": "no plan on 2 devices divides it",
    "bench lenett": "did you mean lenet",
    "bench lenet --recipe defualt": "did you mean default",
    "bench lenet --set batches=3": "batches is unknown",
    "bench lenet --data none": "data set none does not exist",
    "launch hosts a:1,b:1 -- lenet --batch many": "is not a valid integer",
    "plan lenet --nonsense": "no such option",
    "plan": "nothing to plan",
    "plan lenet --devices 0": "--devices is 0",
    "plan lenet --memory-limit many": "--memory-limit many is no size",
    "plan lenet --score smaple=2": "smaple is no strategy",
    "plan lenet --score sample=2 --devices 3": "but --devices is 3",
    "plan lenet --score sample=2 --score sample=3": "--score sample=3 is for 3 devices, but --score sample=2 for 2",
    "plan lenet --score missing.yaml": "missing.yaml",
    "plan lenet --score sample=2 --fix *=filter": "--fix is for a search",
    "plan lenet --images-per-second 0": "--images-per-second is 0",
    "plan lenet --out file/plan.yaml": "--out file/plan.yaml cannot be written",
    "bench lenet --nonsense": "no such option",
    "bench lenet --batch 0": "--batch is 0",
    "bench lenet --batch 8 --batch-per-device 8": "give one",
    "bench lenet --devices two": "--devices two is no list of numbers",
    "bench lenet --plans smaple": "smaple is no part of a plan",
    "bench lenet --plans sample=3 --devices 1,2": "--devices has no 3",
    "bench lenet --shares nan": "--shares nan are no shares",
    "bench lenet --peers horovod": "--peers horovod is no peer",
    "bench lenet --emulate missing.yaml": "there is no cluster file missing.yaml",
    "bench lenet --emulate two.yaml --devices 3": "the cluster of --emulate has 2",
    "bench lenet --out file/study": "--out file/study cannot be written",
}
CODE = """
import contextlib, io, json, sys
from convoy.cli import main
answers = []
for line in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(line.split())
    answers.append((status, said.getvalue(), "torch" in sys.modules))
json.dump(answers, sys.stdout)
"""


def answers(lines: list[str], folder: Path) -> list[tuple[int, str, bool]]:
    """Of each line, one after the other in a fresh process: the status, what it said, and whether torch is loaded."""
    (folder / "file").write_text("")
    (folder / "two.yaml").write_text("devices: {count: 2, speed: 0.5}\nlinks: {rate: 1gbit}\n")
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        input=json.dumps(lines),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return [tuple(answer) for answer in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, bool]]:
    return dict(zip(WRONG, answers(list(WRONG), tmp_path_factory.mktemp("lines")), strict=True))


@pytest.mark.slow
def test_help_does_not_wait_for_torch(tmp_path: Path) -> None:
    assert [(status, torch) for status, _, torch in answers(HELP, tmp_path)] == [(0, False)] * len(HELP)


@pytest.mark.slow
@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_does_not_wait_for_torch(line: str, refused: dict[str, tuple[int, str, bool]]) -> None:
    status, said, torch = refused[line]
    assert status == 2
    assert WRONG[line] in said and said.count("\n") == 1
    assert not torch


@pytest.mark.slow
def test_what_needs_the_network_waits_for_torch(tmp_path: Path) -> None:
    ((status, said, torch),) = answers(["plan lenet --fix fc=filter"], tmp_path)
    assert status == 2 and "matches no layer" in said and "measuring" not in said
    assert torch
