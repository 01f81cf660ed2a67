"""Mistakes of the user that show when data, a run or a network is read: status 2, one sentence that names what to
change, and nothing left on disk. What is refused without them is in `tests/frozen/refused.txt` and `test_early.py`."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from cli.calls import Call, faults

LENET = "train lenet --data {data} --batch 24"
TRAINING = {
    "train lenet --device 2": "--devices 2 for so many",
    "train tiny:Nothing --data {data} --batch 24": "Nothing",
    "train tiny:Unfit --data {data} --batch 24": "logits",
    "train alexnet --data {data} --batch 24": "1×28×28",
    "train lenet --data " + "x" * 300: "too long",
    f"{LENET} --device cuda:99": "cpu",
    f"{LENET} --devices 2 --local-sgd 4 --reproducible": "reproducible gives the same weights on any number of devices",
    f"{LENET} --devices 2 --cores-per-device 999": "needs 1998 cores",
    "train --recipe {tmp}/broken.yaml --data {data}": "broken.yaml, line 3",
    f"{LENET} --weights {{tmp}}/evil.pth": "evil.pth",
    "train lenet --data {tmp}/text.txt": "text.txt",
    f"{LENET} --set loss.aux_weight=0.4": "loss.aux_weight=0.4 has no effect: lenet has no auxiliary heads; leave it",
}
RUNS = {
    "train tiny:TinyNet --data {data} --batch 24 --out {run}": "is finished: choose another --out",
    "train tiny:TinyNet --data {data} --batch 24 --weights {unfinished}": "--resume",
    "train {damaged} --resume --trust-code": "step-",
    "train {bad_config} --resume": "config.yaml",
    "doctor {bad_config}": "config.yaml",
    "eval {damaged} --trust-code": "weights.safetensors",
    "report {damaged}": "metrics.jsonl",
    "report {tmp}/study": "it has no study",
    "export {run} --onnx --to {tmp}/x.pt2": ".onnx",
    "export {run} --torch-export --to {tmp}/x.onnx": ".pt2",
    "export {run} --onnx --to {tmp}/nowhere/x.onnx --trust-code": "nowhere",
    "predict {run} {tmp}/empty --trust-code": "holds no pictures",
    "predict {unfinished} {tmp}/text.txt": "weights.safetensors",
}


@pytest.fixture
def places(data: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    tmp = tmp_path / "places"
    folders = {"tmp": tmp, "data": data, "run": run}
    for name in ("damaged", "unfinished", "bad_config"):
        folders[name] = shutil.copytree(run, tmp / name)
    for state in (folders["damaged"] / "checkpoints").glob("*/state/*.safetensors"):
        state.write_bytes(b"")
    weights = folders["damaged"] / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    (folders["damaged"] / "metrics.jsonl").write_text('{"split": "train"\n{}\n')
    (folders["unfinished"] / "weights.safetensors").unlink()
    (folders["bad_config"] / "config.yaml").write_text("model: {name: lenet\n")
    (tmp / "broken.yaml").write_text("batch: 4\nmodel: [\n")
    (tmp / "text.txt").write_text("hello")
    torch.save({"weight": os.system}, tmp / "evil.pth")
    for name in ("empty", "study", "here"):
        (tmp / name).mkdir()
    (tmp / "study" / "bench.json").write_text('{"format": "convoy-bench", "schema": 1}')
    monkeypatch.chdir(tmp / "here")
    return folders


def contents(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("table", [TRAINING, RUNS], ids=["training", "runs"])
def test_a_mistake_is_one_sentence_and_leaves_nothing(
    table: dict[str, str], places: dict[str, Path], call: Call
) -> None:
    before = contents(places["tmp"])
    assert faults(call, table, **places) == []
    assert contents(places["tmp"]) == before


def test_an_error_of_the_program_has_status_1_and_shows_its_traceback_to_who_asks(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("convoy.cli.models.options.show", fail)
    assert "RuntimeError: broken" in (brief := call("models lenet", status=1).err) and "Traceback" not in brief
    assert "Traceback" in call("models lenet -v", status=1).err
