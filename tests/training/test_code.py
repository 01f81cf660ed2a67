"""Runs are gone on with by the code that began them, on any plan; other code is refused by its first layer, or said."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from changing import CHANGES, Changing
from convoy.cli import main
from convoy.errors import ConvoyError
from convoy.ops import capture
from convoy.training import load_recipe, train
from convoy.training.code import code_of, difference
from convoy.training.restore import load_run
from ranks import run_ranks
from tiny import write_mnist
from whole_runs import BASE, Words, as_before, train_here, train_until


@pytest.fixture(autouse=True)
def _unchanged() -> None:
    CHANGES.clear()


def written(**changes: Any) -> list[list[str]]:
    CHANGES.clear()
    CHANGES.update(changes)
    model = Changing()
    code = code_of(model, capture(model, [torch.empty(4, 1, 12, 12, device="meta")], True))
    return json.loads(json.dumps(code))  # as a checkpoint gives it back


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"act": nn.ReLU}, "layer act was silu and is relu"),
        ({"drop": 0.5}, "layer drop was dropout(p=0.1, training=True) and is dropout(p=0.5, training=True)"),
        ({"eps": 1e-3}, "layer norm was batch_norm(training=True, momentum=0.1, eps=1e-05) and is batch_norm("),
        ({"stride": 1}, "layer conv was conv2d((2, 2), (1, 1), (1, 1), 1) and is conv2d((1, 1), (1, 1), (1, 1), 1)"),
        ({"scale": 2.0}, "the network itself, mul, takes other tensors than it took"),
        ({"skip": True}, "conv2d((2, 2), (1, 1), (1, 1), 1) of layer conv comes where mean((2, 3)) of the network"),
        ({"more": [torch.tanh]}, "the network itself was mul and is tanh"),
    ],
)
def test_the_first_layer_that_differs_is_named(changes: dict[str, Any], words: str) -> None:
    assert difference(written(), written(**changes)).startswith(words)


def test_what_computes_the_same_is_the_same() -> None:
    one = written(more=[F.relu, lambda x: x + x, torch.square])
    other = written(more=[lambda x: x.relu_(), lambda x: torch.add(x, x), lambda x: x.square()])
    assert difference(one, other) == ""


def test_a_call_more_or_less_at_the_end_is_named() -> None:
    code = written()
    assert difference(code, code[:-1]) == "linear of layer head is gone"
    assert difference(code[:-1], code) == "linear of layer head is new"


def run(data: Path, out: Path, resume: bool = False, accept: bool = False, **settings: str) -> list[str]:
    options = BASE | {"data.path": str(data), "model.name": "changing:Changing", "epochs": "2ba"} | settings
    words = Words()
    with as_before():
        recipe = load_recipe("default", [f"{key}={value}" for key, value in options.items()])
        cpu = torch.device("cpu")
        train(recipe, out, resume=resume, device=cpu, reporter=words, accept_code_change=accept, keep=False)
    return words.said


@pytest.mark.parametrize("network", ["Changing", "Unseen"])
def test_other_code_is_refused_and_an_option_goes_on(tmp_path: Path, network: str) -> None:
    data, out = write_mnist(tmp_path / "data"), tmp_path / "run"
    name = {"model.name": f"changing:{network}"}
    run(data, out, **name)
    run(data, out, resume=True, **name)
    CHANGES["act"] = nn.ReLU
    before = (out / "summary.json").read_bytes()
    changed = "layer act was silu and is relu" if network == "Changing" else r"layer act was SiLU\(\) and is ReLU\(\)"
    with pytest.raises(ConvoyError, match=rf"another than at update 2 \({changed}\): .*--accept-code-change"):
        run(data, out, resume=True, **name)
    assert (out / "summary.json").read_bytes() == before
    more = name | {"extends": str(out), "epochs": "3ba"}
    with pytest.raises(ConvoyError, match=changed):
        run(data, tmp_path / "longer", **more)
    said = run(data, tmp_path / "longer", accept=True, **more)
    (sentence,) = [each for each in said if each.startswith("from update 3 on with other code")]
    assert sentence in json.loads((tmp_path / "longer" / "summary.json").read_text())["notes"]
    assert not any("other code" in each for each in run(data, tmp_path / "longer", resume=True, **more))


def test_the_command_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_mnist(tmp_path / "data"), tmp_path / "run"
    run(data, out)
    (out / "weights.safetensors").unlink()  # the run is not finished
    CHANGES["act"] = nn.ReLU
    with as_before():
        assert main(["train", str(out), "--resume", "--device", "cpu"]) == 2
        assert "layer act was silu and is relu" in capsys.readouterr().err
        assert main(["train", str(out), "--resume", "--device", "cpu", "--accept-code-change"]) == 0
    sentence = "from update 3 on with other code: layer act was silu and is relu"
    assert sentence in capsys.readouterr().out
    assert sentence in (out / "report.html").read_text()


@pytest.mark.parametrize("network", ["Changing", "Unseen"])
def test_whoever_uses_a_run_by_other_code_is_told(
    tmp_path: Path, network: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_mnist(tmp_path / "data"), tmp_path / "run"
    run(data, out, **{"model.name": f"changing:{network}"})
    with as_before():
        assert main(["eval", str(out), "--device", "cpu"]) == 0
        assert "another than" not in capsys.readouterr().err  # and no warning, which would be an error here
        before = (out / "evaluation.json").read_bytes()
        CHANGES["act"] = nn.ReLU
        assert main(["eval", str(out), "--device", "cpu"]) == 0
        assert main(["eval", str(out), "--checkpoint", "2", "--device", "cpu"]) == 0
    assert capsys.readouterr().err.count(f"another than that which trained {out} (layer act was") == 2
    assert (out / "evaluation.json").read_bytes() == before
    with pytest.warns(UserWarning, match="its results are others"):
        load_run(out)


def test_checkpoints_of_before_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = write_mnist(tmp_path / "data"), tmp_path / "run"
    monkeypatch.setattr("convoy.training.set_up.code_of", lambda *of: None)
    run(data, out)
    monkeypatch.undo()
    CHANGES["act"] = nn.ReLU
    (out / "weights.safetensors").unlink()
    assert any("going on after 2 of 2 updates" in each for each in run(data, out, resume=True))


def test_it_is_the_same_on_every_plan(tmp_path: Path) -> None:
    data = write_mnist(tmp_path / "data")
    settings = {"epochs": "4ba", "checkpoint.every": "1ba", "parallel.plan": "filter=2"}
    run_ranks(train_until, 2, data, tmp_path / "run", settings, 2)
    ended = run_ranks(train_here, 2, data, tmp_path / "run", settings | {"parallel.plan": "stage=2"}, True)
    assert ended[0].said[0].startswith("going on after")
    again = run_ranks(train_here, 1, data, tmp_path / "run", settings | {"parallel.plan": "serial"}, True)
    assert again[0].said[0].startswith("going on after 4 of 4 updates")
