"""A run made longer in a new one: exact, the same on one device and two, and nothing of the old one is touched."""

import json
import shutil
from pathlib import Path

import pytest

from convoy.cli import main
from convoy.cli.requests import new_length
from convoy.training.config import Duration
from convoy.training.run_directory import RunDirectory
from ranks import run_ranks
from tiny import write_mnist
from whole_runs import Ended, train_here

FLAT = {"schedule.name": "constant", "schedule.warmup": "0ep"}
SETTINGS = {"reproducible": "true", "ema.decay": "0.9", "optimizer.momentum": "0.9", "evaluate_every": "3ba"}
OLD, NEW = "10ba", "18ba"  # from the middle of an epoch to that of another: an epoch has 4 updates


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_mnist(tmp_path / "data")


def trained(data: Path, out: Path, devices: int = 1, resume: bool = False, **settings: str) -> Ended:
    values = SETTINGS | {key.replace("__", "."): value for key, value in settings.items()}
    found = run_ranks(train_here, devices, data, out, values, resume)[0]
    assert isinstance(found, Ended)
    return found


def holds(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.slow
def test_it_ends_as_the_run_of_that_length_and_leaves_the_old_one_as_it_was(data: Path, tmp_path: Path) -> None:
    whole = trained(data, tmp_path / "whole", epochs=NEW, **FLAT)
    trained(data, old := tmp_path / "old", epochs=OLD, **FLAT)
    before = holds(old)
    longer = {"epochs": NEW, "extends": str(old)}
    found = [trained(data, tmp_path / f"on-{n}", n, **longer, **FLAT) for n in (1, 2)]
    assert [each.digest for each in found] == [whole.digest, whole.digest]
    assert found[0].curve[-5:] == whole.curve[-5:]
    assert holds(old) == before
    # Its curves begin with the old one's, which was evaluated at its end too.
    lines = [json.loads(line) for line in (tmp_path / "on-1" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["split"] == "train"] == list(range(1, 19))
    assert [line["step"] for line in lines if line["split"] == "test"] == [3, 6, 9, 10, 12, 15, 18]
    # The weights alone are not the state.
    again = trained(data, tmp_path / "again", epochs="8ba", model__weights=str(old), **FLAT)
    assert again.digest != whole.digest


@pytest.mark.slow
def test_a_cosine_of_the_new_length_is_the_same_on_any_plan_and_after_a_stop(data: Path, tmp_path: Path) -> None:
    trained(data, old := tmp_path / "old", epochs=OLD)
    longer = {"epochs": NEW, "extends": str(old), "checkpoint__every": "1ba", "checkpoint__keep": "20"}
    one = trained(data, tmp_path / "one", **longer)
    said = [sentence for sentence in one.said if sentence.startswith("begins with the state of")]
    assert said and f"of {old} after 10 updates; the learning rate, 0.00" in said[0] and said[0].endswith("of 18ba")
    two = trained(data, tmp_path / "two", 2, **longer)
    assert two.digest == one.digest
    # As one that was killed after 14 updates goes on, and as one that was killed before its first checkpoint.
    for name, kept in (("later", 14), ("at once", 0)):
        copy = shutil.copytree(tmp_path / "one", tmp_path / name)
        for folder in (copy / "checkpoints").iterdir():
            if int(folder.name.partition("-")[2]) > kept:
                shutil.rmtree(folder)
        (copy / "weights.safetensors").unlink()
        assert trained(data, copy, 2, resume=True, **longer).digest == one.digest
        assert (copy / "metrics.jsonl").read_text().count('"train"') == 18


@pytest.mark.slow
def test_the_first_checkpoint_makes_the_old_run_dispensable(data: Path, tmp_path: Path) -> None:
    trained(data, old := tmp_path / "old", epochs=OLD)
    longer = {"epochs": NEW, "extends": str(old), "checkpoint__every": "100ba", "checkpoint__keep": "20"}
    one = trained(data, new := tmp_path / "new", **longer)
    shutil.rmtree(old)
    for folder in (new / "checkpoints").iterdir():
        if folder.name != "step-00000010":
            shutil.rmtree(folder)
    assert trained(data, new, resume=True, **longer).digest == one.digest


def command(data: Path, out: Path, *options: str) -> list[str]:
    line = f"train tiny:TinyNet --data {data} --batch 24 --epochs 2ep --set threads=1 --out {out}"
    return [*line.split(), *options]


@pytest.mark.slow
def test_on_the_command_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old"
    assert main(command(data, old)) == 0
    for _ in range(2):
        assert main(["train", str(old), "--extend", "1", "--set", "schedule.name=constant"]) == 0
    new = tmp_path / "old-extended"
    assert (tmp_path / "old-extended-2" / "weights.safetensors").exists()
    config = (new / "config.yaml").read_text()
    assert "epochs: 3ep" in config and f"extends: {old}" in config
    assert json.loads((new / "summary.json").read_text())["steps"] == 12
    assert main(["train", str(new), "--resume"]) == 0
    capsys.readouterr()
    again = tmp_path / "new"
    for _ in range(2):  # the same command line begins the run, and goes on with it
        assert main(["train", str(old), "--extend", "1", "--out", str(again), "--resume"]) == 0
    assert "going on after 12 of 12 updates" in capsys.readouterr().out
    assert main(["train", str(old), "--resume", "--epochs", "8"]) == 2
    said = capsys.readouterr().err
    assert f"convoy train {old} --extend 6ep" in said and f"--weights {old}" in said
    assert main(["train", str(old)]) == 2
    assert f"make it longer by convoy train {old} --extend 8ep" in capsys.readouterr().err


REFUSED = {
    "another batch": (["--extend", "1", "--batch", "12"], "was trained with batch=24, so a run that extends it cannot"),
    "another optimizer": (["--extend", "1", "--set", "optimizer.name=adamw", "--lr", "0.1"], "--weights"),
    "another seed": (["--extend", "1", "--seed", "3"], "seed=0, so a run that extends it cannot have seed=3"),
    "no length": (["--extend", "long"], "--extend: 'long' is not a duration: write epochs as 90ep"),
    "nothing": (["--extend", "0"], "--extend 0 is no length to train on for"),
    "a share": (["--extend", "5%"], "--extend 5% is no length to train on for"),
    "two lengths": (["--extend", "1", "--epochs", "3"], "--epochs contradicts --extend"),
    "another recipe": (["--extend", "1", "--recipe", "lenet-mnist"], "--recipe contradicts --extend"),
    "to go on": (["--extend", "1", "--resume"], "--extend begins a new run: go on with that one by"),
}


def test_what_cannot_be_is_refused_and_nothing_is_made(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old"
    assert main(command(data, old)) == 0
    before = sorted(tmp_path.iterdir())
    for name, (options, words) in REFUSED.items():
        capsys.readouterr()
        assert main(["train", str(old), *options]) == 2, name
        assert words in capsys.readouterr().err, name
    assert main(["train", "lenet", "--extend", "1"]) == 2
    assert "lenet is no run directory: --extend needs the run to make longer" in capsys.readouterr().err
    less = write_mnist(tmp_path / "less", num_train=72)
    assert main(["train", str(old), "--extend", "1", "--data", str(less)]) == 2
    assert "the data are not those that" in capsys.readouterr().err
    shutil.rmtree(less)
    shutil.move(old / "checkpoints", tmp_path / "away")
    assert main(["train", str(old), "--extend", "1"]) == 2
    assert "has no checkpoints any more" in capsys.readouterr().err
    shutil.move(tmp_path / "away", old / "checkpoints")
    summary = json.loads((old / "summary.json").read_text())
    (old / "summary.json").write_text(json.dumps(summary | {"status": "stopped"}))
    assert main(["train", str(old), "--extend", "1"]) == 2
    assert "is not finished (its summary says stopped)" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_lengths_in_other_units_are_counted_in_updates(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.config.write_text("model: {name: lenet}\ndata: {path: mnist-mini}\nbatch: 10\nepochs: 2ep\n")
    run.summary_file.write_text('{"num_train": 105}')
    assert new_length(run, "8") == new_length(run, "8ep") == Duration(10, "ep")
    assert new_length(run, "0.1") == Duration(2.1, "ep")
    assert new_length(run, "7ba") == Duration(27, "ba")
