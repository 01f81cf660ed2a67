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
    "export runs/none": "say what to export",
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


def test_help_does_not_wait_for_torch(tmp_path: Path) -> None:
    assert [(status, torch) for status, _, torch in answers(HELP, tmp_path)] == [(0, False)] * len(HELP)


@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_does_not_wait_for_torch(line: str, refused: dict[str, tuple[int, str, bool]]) -> None:
    status, said, torch = refused[line]
    assert status == 2
    assert WRONG[line] in said and said.count("\n") == 1
    assert not torch


def test_a_network_that_is_none_is_found_with_torch(tmp_path: Path) -> None:
    ((status, said, torch),) = answers(["plan lenett"], tmp_path)
    assert status == 2 and "did you mean lenet" in said
    assert torch
