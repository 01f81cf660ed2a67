"""Two starts of one run directory: one trains, the other is told so, and nothing of the first is touched."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from convoy.cli import main
from convoy.errors import ConvoyError
from convoy.progress import Reporter
from convoy.training import RunDirectory, load_recipe, train
from convoy.training.environment import join_ranks
from ranks import run_ranks
from tiny import write_mnist
from whole_runs import BASE, Words, as_before, train_here

training = importlib.import_module("convoy.training.run")  # the name is also that of its function


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_mnist(tmp_path / "data")


def holds(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def command(data: Path, out: Path) -> list[str]:
    sets = [part for key, value in (BASE | {"epochs": "2ba"}).items() for part in ("--set", f"{key}={value}")]
    return ["train", "--recipe", "default", "--data", str(data), "--out", str(out), *sets]


@pytest.mark.parametrize("resume", [False, True])
def test_the_second_ends_with_a_sentence_before_anything_costly(
    data: Path,
    tmp_path: Path,
    resume: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    with as_before():
        assert main(command(data, out)) == 0

    def costly(*_: object, **__: object) -> None:
        raise AssertionError("something costly was begun")

    monkeypatch.setattr(training, "LOCK_PATIENCE_S", 0.0)
    monkeypatch.setattr(training, "set_up", costly)
    with RunDirectory(out).lock():
        before = holds(out)
        assert main([*command(data, out), *(["--resume"] if resume else [])]) == 2
        assert f"convoy: another process is training in {out} (process " in capsys.readouterr().err
        assert holds(out) == before


def test_two_that_begin_at_once_do_not_share_a_folder(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    recipe = load_recipe("default", [f"{k}={v}" for k, v in (BASE | {"data.path": str(data), "epochs": "2ba"}).items()])
    with as_before(), RunDirectory(out).lock(), pytest.raises(ConvoyError, match="another process is training"):
        train(recipe, out, device=torch.device("cpu"), reporter=Reporter())
    assert [path.name for path in out.iterdir()] == [".lock"]
    with as_before():
        train(recipe, out, device=torch.device("cpu"), reporter=Reporter())


def test_who_begins_as_another_one_ends_is_told_of_its_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = RunDirectory.lock

    def later(self: RunDirectory, *rest: object, **more: object) -> object:
        if not self.is_run():
            self.create("seed: 0\n", {"device": "cpu"})  # by the other one, which then failed
        return lock(self)

    monkeypatch.setattr(RunDirectory, "lock", later)
    recipe = load_recipe("default", [f"{k}={v}" for k, v in (BASE | {"data.path": str(data), "epochs": "2ba"}).items()])
    with as_before(), pytest.raises(ConvoyError, match="already holds a run: add --resume to go on with it"):
        train(recipe, tmp_path / "run", device=torch.device("cpu"), reporter=Reporter())


def test_ranks_that_are_started_again_wait_until_a_file_server_breaks_the_lock(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    lock = RunDirectory.lock

    def noted(self: RunDirectory, patience_s: float = 0.0, *rest: object, **more: object) -> object:
        waited.append(patience_s)
        return lock(self, 0.0)

    monkeypatch.setattr(RunDirectory, "lock", noted)
    values = BASE | {"data.path": str(data), "epochs": "2ba"}
    recipe = load_recipe("default", [f"{key}={value}" for key, value in values.items()])
    for jobs in (["job"], ["job"], ["another"]):
        with as_before():
            train(recipe, tmp_path / "run", resume=True, device=torch.device("cpu"), reporter=Words(), jobs=jobs)
    assert waited == [0.0, 150.0, 30.0]


def _held(data: Path, out: Path) -> str:
    """Two ranks that want to go on with a run that another process has."""
    ranks, device = join_ranks()
    values = BASE | {"data.path": str(data), "parallel.devices": "2", "epochs": "2ba"}
    recipe = load_recipe("default", [f"{key}={value}" for key, value in values.items()])
    with as_before() as patch:
        patch.setattr(training, "LOCK_PATIENCE_S", 0.0)
        with pytest.raises(ConvoyError) as caught:
            train(recipe, out, resume=True, device=device, ranks=ranks, reporter=Reporter())
    return str(caught.value)


@pytest.mark.slow
def test_all_ranks_of_the_second_end(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_ranks(train_here, 2, data, out, {"epochs": "2ba"})
    with RunDirectory(out).lock():
        before = holds(out)
        one, other = run_ranks(_held, 2, data, out)
        assert one == other and one.startswith(f"another process is training in {out} ")
        assert holds(out) == before
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"
