"""`convoy.train` leaves what the command leaves, to the bit, refuses what it refuses, and gives the run."""

import ast
import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import convoy
from started import ENVIRONMENT, command, digest, finish, steps, wait_for

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
SETTINGS = {"microbatch": 3, "log_every": "1ba", "data.augment": {"crop": "pad"}}
RUN: dict[str, Any] = {"model": "tiny:TinyNet", "batch": 24, "reproducible": True, "settings": SETTINGS}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("no such option --epohs: did you mean --epochs", {"epohs": 3}),
    ("'many' is not a valid integer", {"devices": "many"}),
    ("unknown model 'tinny': ", {"model": "tinny"}),
    ("optimizer.momentun is unknown", {"optimizer.momentun": 0.9}),
    ("optimizer.lr", {"lr": 0.1, "optimizer.lr": 0.2}),
    ("data set nowhere does not exist", {"data": "nowhere"}),
    ("nothing to train", {"model": None}),
    ("a batch of|devices", {"devices": 25}),
    ("holds no run to go on with", {"out": "nowhere", "model": None, "resume": True}),
    ('model is only in this process: .*"mine.py:NAME"', {"model": torch.nn.ReLU()}),
    ('loss is only in this process: .*"mine.py:NAME"', {"loss": torch.nn.functional.nll_loss}),
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, ENVIRONMENT[name])


@pytest.mark.parametrize(("words", "options"), REFUSED)
def test_refused_as_by_the_command(words: str, options: dict[str, Any], data: Path, tmp_path: Path) -> None:
    with pytest.raises(convoy.ConvoyError, match=words) as caught:
        convoy.train(**{**RUN, "data": data, **options})
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_the_run_is_that_of_the_command_and_a_notebook_shows_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(command(data, tmp_path / "typed", epochs="12ba"))
    run = convoy.train(**RUN, data=data, epochs="12ba", devices=2, **{"optimizer.lr": 0.05})
    assert run.path == Path("runs/tiny-TinyNet-data") and digest(run.path) == digest(tmp_path / "typed")
    assert [line["step"] for line in run.metrics if line["split"] == "train"] == [*range(1, run.summary["steps"] + 1)]
    assert "&lt;svg" in run.report()._repr_html_()
    plain = capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    other = convoy.train(**RUN, data=str(data), epochs="12ba", lr=0.04)
    assert digest(other.path) != digest(run.path)
    shown = [line.rpartition("\r")[2] for line in capsys.readouterr().out.split("\n")]
    assert "data wait" in plain and "\r" not in plain
    assert "data wait" not in "".join(shown) and "test accuracy" in shown[-3]
    with pytest.raises(convoy.ConvoyError, match="already holds a run, which is finished: choose another --out"):
        convoy.train(**RUN, data=data, out=run.path)


@pytest.mark.slow
def test_an_interrupt_saves_and_the_run_goes_on(data: Path, tmp_path: Path) -> None:
    finish(command(data, tmp_path / "whole", epochs="100ba"))

    def interrupt() -> None:
        wait_for(lambda: steps(tmp_path / "run") >= 5, 60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(convoy.ConvoyError, match=r"interrupted: go on with convoy.train\('run', resume=True\)"):
        convoy.train(**RUN, data=data, epochs="100ba", lr=0.05, devices=2, out="run")
    thread.join()
    assert 5 <= json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] < 100
    assert convoy.train("run", resume=True, trust_code=True).summary["steps"] == 100
    assert digest(tmp_path / "run") == digest(tmp_path / "whole")


@pytest.mark.slow
def test_the_notebook_runs_cell_by_cell() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    for cell in cells:
        assert not cell["outputs"] and cell["execution_count"] is None
        exec(compile(ast.parse("".join(cell["source"])), str(NOTEBOOK), "exec"), names)
    assert names["longer"].summary["steps"] == 1.5 * names["run"].summary["steps"]
