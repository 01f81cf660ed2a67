"""The data of a run may lie elsewhere when it goes on; other data are refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from convoy.errors import ConvoyError
from convoy.training import load_recipe, train
from tiny import write_mnist
from whole_runs import BASE, Words, as_before


def run(data: str, out: Path, resume: bool = False) -> list[str]:
    recipe = load_recipe("default", [f"{k}={v}" for k, v in (BASE | {"data.path": data, "epochs": "2ba"}).items()])
    words = Words()
    with as_before():
        train(recipe, out, resume=resume, device=torch.device("cpu"), reporter=words)
    return words.said


def test_another_place_is_said_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = write_mnist(tmp_path / "data"), tmp_path / "run"
    run(str(data), out)
    moved = shutil.move(data, tmp_path / "elsewhere")
    sentence = f"the data come from {moved}, not from {data} as when the run was begun"
    assert sentence in run(str(moved), out, resume=True)
    assert sentence in json.loads((out / "summary.json").read_text())["notes"]
    assert load_recipe(str(out / "config.yaml")).data.path == str(data)
    shutil.move(moved, data)
    assert not any("the data come from" in said for said in run(f"{data}/", out, resume=True))
    monkeypatch.chdir(tmp_path)
    assert not any("the data come from" in said for said in run("data", out, resume=True))
    restarts = json.loads((out / "environment.json").read_text())["restarts"]
    assert [restart.get("data") for restart in restarts] == [str(moved)]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("classes", ["cat", "dog"], "other classes"), ("mean", [0.5], r"mean was \[0\.5\] and is \[0\.1307\]")],
)
def test_other_data_are_refused(tmp_path: Path, key: str, value: object, words: str) -> None:
    data, out = write_mnist(tmp_path / "data"), tmp_path / "run"
    run(str(data), out)
    begun = json.loads((out / "environment.json").read_text())
    (out / "environment.json").write_text(json.dumps(begun | {"input": begun["input"] | {key: value}}))
    with pytest.raises(ConvoyError, match=rf"the data are not those that {out} was begun on \({words}\)"):
        run(str(data), out, resume=True)


def test_fewer_samples_are_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    data, out = write_mnist(tmp_path / "data"), tmp_path / "run"
    run(str(data), out)
    before = (out / "summary.json").read_bytes()
    words = r"was begun on \(the number of training samples was 96 and is 72\): name the same data by --data"
    with pytest.raises(ConvoyError, match=words):
        run(str(write_mnist(tmp_path / "less", 72)), out, resume=True)
    assert (out / "summary.json").read_bytes() == before
