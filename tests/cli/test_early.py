"""What can be refused at once is: before ranks are started, data are opened or a cluster is emulated."""

from pathlib import Path

import pytest

from convoy.cli import main
from convoy.training import load_recipe
from convoy.training.set_up import check_devices

TRAIN = "train lenet --data {tmp}/two.yaml"
BENCH = "bench lenet --data {tmp}/nowhere"
WRONG = {
    "a place below a file": (f"{TRAIN} --out {{tmp}}/file/run", "cannot write to"),
    "the same for several devices": (f"{TRAIN} --devices 2 --out {{tmp}}/file/run", "cannot write to"),
    "a folder of others": (f"{TRAIN} --devices 2 --out {{tmp}}", "is not empty"),
    "more devices than samples": (f"{TRAIN} --devices 64 --batch 32", "cannot be divided over 64 devices"),
    "a plan of other devices": (f"{TRAIN} --devices 2 --plan sample=3", "is for 3 devices, but 2 run"),
    "shares of other parts": (f"{TRAIN} --devices 2 --shares 1,2,3", "--shares names 3 parts"),
    "shares of devices": (f"{TRAIN} --plan sample=2,filter=2 --shares 1,1,1,1", "into 2: give 2 numbers"),
    "shares of no plan": (f"{TRAIN} --devices 2 --plan auto --shares 1,2,3", "no plan on 2 devices divides it"),
    "a study below a file": (f"{BENCH} --out {{tmp}}/file/study", "--out"),
    "a study with wrong shares": (f"{BENCH} --emulate {{tmp}}/two.yaml --shares half", "--shares half"),
    "a study on too many devices": (f"{BENCH} --emulate {{tmp}}/two.yaml --devices 3", "--emulate has 2"),
    "a plan for a file below a file": ("plan lenet --devices 2 --out {tmp}/file/plan.yaml", "--out"),
    "a plan with wrong shares": ("plan lenet --devices 2 --shares 1,2,3", "no plan on 2 devices divides it"),
}
COSTLY = ("convoy.launch.start", "convoy.training.set_up.open_data", "convoy.bench.command.open_data")


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command line runs, if it does nothing costly."""

    def costly(*_: object, **__: object) -> None:
        raise AssertionError("something costly was begun")

    for name in (*COSTLY, "convoy.bench.command.emulate"):
        monkeypatch.setattr(name, costly)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "two.yaml").write_text("devices: {count: 2, speed: 0.5}\nlinks: {rate: 1gbit}\n")
    return tmp_path


@pytest.mark.parametrize("case", WRONG)
def test_it_is_refused_at_once(case: str, tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, words = WRONG[case]
    before = sorted(tmp.rglob("*"))
    assert main(line.format(tmp=tmp).split()) == 2
    assert words in capsys.readouterr().err
    assert sorted(tmp.rglob("*")) == before


@pytest.mark.parametrize("case", ["the same for several devices", "shares of other parts"])
def test_without_the_checks_it_would_not_be(
    case: str, tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("check_run", "check_devices"):
        monkeypatch.setattr(f"convoy.cli.train_run.{name}", lambda *_: None)
    monkeypatch.setattr("convoy.cli.requests.TrainRequest.check", lambda _: None)
    assert main(WRONG[case][0].format(tmp=tmp).split()) == 1
    assert "something costly was begun" in capsys.readouterr().err


@pytest.mark.parametrize(
    "plan", ["owt=4", "filter=4", "auto", "{mesh: {a: 4}, layers: {conv: {a: sample}, '*': {a: filter}}}"]
)
def test_what_depends_on_the_layers_is_not_refused_early(plan: str) -> None:
    recipe = load_recipe("default", ["model.name=lenet", "data.path=nowhere", "batch=32"])
    parallel = recipe.parallel.model_copy(update={"plan": plan})
    check_devices(recipe.model_copy(update={"parallel": parallel}), 4)
