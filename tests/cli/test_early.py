"""What can be refused at once is: before ranks are started, data are opened or a cluster is emulated."""

from pathlib import Path

import pytest

from convoy.cli import main
from convoy.training import load_recipe
from convoy.training.build import divisible_sizes, on_meta
from convoy.training.set_up import check_devices

TRAIN = "train lenet --data {tmp}/two.yaml"
BENCH = "bench lenet --data {tmp}/nowhere"
WRONG = {
    "a place below a file": (f"{TRAIN} --out {{tmp}}/file/run", "cannot write to"),
    "the same for several devices": (f"{TRAIN} --devices 2 --out {{tmp}}/file/run", "cannot write to"),
    "a folder of others": (f"{TRAIN} --devices 2 --out {{tmp}}", "is not empty"),
    "more devices than samples": (f"{TRAIN} --devices 64 --batch 32", "cannot be divided over 64 devices"),
    "fewer microbatches than devices, with batch norm": (
        "train resnet18 --data {tmp}/two.yaml --devices 2 --batch 32",
        "a batch of 32 is 1 microbatch, and 2 devices need 2: add --microbatches 2",
    ),
    "the same with reproducible bits": (f"{TRAIN} --devices 2 --batch 32 --reproducible", "add --microbatches 2"),
    "the same where they are said": (f"{TRAIN} --devices 2 --batch 32 --set microbatches=1", "add --microbatches 2"),
    "a plan for no layer": (
        f"{TRAIN} --plan {{tmp}}/plan.yaml",
        "did you mean features.*?",
    ),
    "more parts than filters": (f"{TRAIN} --plan filter=20", "only 6 output channels for the 20 ranks"),
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
    (tmp_path / "plan.yaml").write_text("mesh: {a: 2}\nlayers: {feature.*: {a: filter}}\n")
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


@pytest.mark.parametrize("batch_norm", ["sync", "microbatch"])
def test_microbatches_become_smaller_where_nothing_depends_on_them(batch_norm: str) -> None:
    net = {"sync": "resnet18", "microbatch": "lenet"}[batch_norm]
    recipe = load_recipe("default", [f"model.name={net}", "data.path=nowhere", "batch=32", f"batch_norm={batch_norm}"])
    model = on_meta(recipe)
    assert model is not None
    sizes, said = divisible_sizes(recipe, model, 3)
    assert sizes == (11, 11, 10)
    assert said is not None and "3 microbatches of 11 samples at most, not 1 of 32" in said
    assert divisible_sizes(recipe, model, 1) == ((32,), None)
    for key, value in (("reproducible", True), ("microbatch", 31)):
        assert len(divisible_sizes(recipe.model_copy(update={key: value}), model, 3)[0]) < 3
    check_devices(recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"devices": 2})}), 2)


def test_nothing_to_resume_says_what_to_do(tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp / "runs/first").mkdir(parents=True)
    assert main(["train", "runs/first", "--resume"]) == 2
    assert "nothing was trained in runs/first yet" in capsys.readouterr().err
    (tmp / "runs/first/config.yaml").write_text("")
    assert main(["train", "runs/frist", "--resume"]) == 2
    assert "did you mean runs/first?" in capsys.readouterr().err
    assert main(["train", "runs/other", "--resume"]) == 2
    assert "start it anew, without --resume" in capsys.readouterr().err
