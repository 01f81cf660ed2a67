"""Mistakes of the user: status 2, one sentence that names what to change, and nothing left on disk, before torch is
loaded where that can be. Other lines are in `tests/frozen/refused.txt`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.calls import Call
from convoy.cli.app import VERBS
from convoy.cli.launch import LAUNCHERS
from started import ENVIRONMENT

HELP = ["--help", *(f"{verb} --help" for verb in VERBS), *(f"launch {name} --help" for name in LAUNCHERS)]
LENET = "train lenet --data mnist-mini"
WITHOUT_TORCH = {
    "train lenet --deivces 2": "no such option --deivces: did you mean --device or --devices? see convoy train --help",
    f"{LENET} --plan smaple=2": "smaple is no strategy: did you mean sample?",
    f"{LENET} --out file/run --devices 2": "cannot write to",
    "train mine:net:work.py --data mnist-mini --set batch=x": "batch is x",
    "train none --extend 8": "none holds no run, which --extend 8 needs: name a run's folder",
    "train none --extend 8 --resume": "--extend begins a new run, and --resume goes on with one: give one",
    "trian lenet": "no such command 'trian': did you mean train? see convoy --help",
    f"{LENET} --device gpu": "--device gpu is no device: use cpu, cuda or cuda:N",
    "bench lenet --device 1,2": "or --devices 1,2 for so many",
    "plan lenet --data photos": "plan needs no data: give --image-size",
    f"{LENET} --epochs -3": "--epochs: -3 is below 0",
    f"{LENET} --batch 2 --microbatches 4": "--microbatches 4 cannot be made of --batch 2 samples",
    f"{LENET} --batch 2 --set microbatches=4": "microbatches=4 cannot be made of --batch 2 samples",
    f"{LENET} --loss mae": "for the built-in one: --set loss.name=mae",
    f"{LENET} --class-weights -1": "nor weights, such as A=1,B=3",
    f"{LENET} --set data.sampling=x": "must be balanced or a section with keys of its own, as {A: 1, B: 3}",
    f"{LENET} --target 97": "write 0.97",
    "train runs/frist --resume": "did you mean runs/first?",
    "data pack none packed": "data set none does not exist",
    "doctor train lenet --data missing --verify": "data set missing does not exist",
    "plan lenet --fix fc1": "'fc1' fixes nothing",
    "plan lenet --out file/plan.yaml": "--out file/plan.yaml cannot be written",
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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that lines are typed in."""
    here = tmp_path / "here"
    (here / "runs" / "first").mkdir(parents=True)
    (here / "file").write_text("")
    (here / "runs" / "first" / "config.yaml").write_text("")
    monkeypatch.chdir(here)
    return here


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


def test_an_error_of_the_program_has_status_1(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("convoy.cli.lists.options.show", fail)
    assert "RuntimeError: broken" in (brief := call("models lenet", status=1).err) and "Traceback" not in brief
    assert "Traceback" in call("models lenet -v", status=1).err
