"""What a run goes on with may lie elsewhere, data or processor, and that is said; other data are refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from convoy.errors import ConvoyError
from convoy.training import load_recipe, train
from convoy.training.environment import machine
from tiny import write_mnist
from whole_runs import BASE, Words, as_before


def run(data: str, out: Path, resume: bool = False, **more: str) -> list[str]:
    options = BASE | {"data.path": data, "epochs": "2ba"} | more
    recipe = load_recipe("default", [f"{k}={v}" for k, v in options.items()])
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


@pytest.mark.parametrize("reproducible", ["true", "false"])
def test_another_processor_is_said_of_reproducible_runs(tmp_path: Path, reproducible: str) -> None:
    data, out = write_mnist(tmp_path / "data"), tmp_path / "run"

    def go_on(**recorded: str) -> list[str]:
        begun = json.loads((out / "environment.json").read_text())
        (out / "environment.json").write_text(json.dumps(begun | recorded))
        (out / "summary.json").unlink(missing_ok=True)  # the run is not finished
        said = run(str(data), out, resume=True, reproducible=reproducible)
        return [sentence for sentence in said if "the run was begun on" in sentence]

    run(str(data), out, reproducible=reproducible)
    assert go_on() == []
    facts = machine(torch.device("cpu"))
    here = f"{facts['machine']} with {facts['kernels']}"
    sentences = go_on(machine="Z80", kernels="DEFAULT") + go_on(kernels="AVX9 with AMX")
    starts = [f"the run was begun on Z80 with DEFAULT and continues on {here}: its numbers may differ"]
    starts.append(f"the run was begun on Z80 with AVX9 with AMX and continues on {here}: its numbers may differ")
    assert len(sentences) == (2 if reproducible == "true" else 0)
    assert all(sentence.startswith(start) for sentence, start in zip(sentences, starts, strict=False))
    if sentences:
        assert sentences[-1] in json.loads((out / "summary.json").read_text())["notes"]
        restarts = json.loads((out / "environment.json").read_text())["restarts"]
        assert [restart.get("kernels") for restart in restarts] == [None, facts["kernels"], facts["kernels"]]
