"""A run directory that a Convoy of before has left: it is gone on with, evaluated, shown again and loaded."""

import json
import shutil
import tarfile
from pathlib import Path

import pytest

import convoy
from convoy.cli import main
from frozen.golden import FOLDER, RENEWING, golden, unlike
from frozen.runs import lines, numbers
from frozen.test_runs import train
from ranks import run_ranks
from whole_runs import as_before

ARCHIVE = FOLDER / "run.tar.gz"
COMMAND = """train frozen.nets:Double --set model.options.of=frozen.nets:Small --data mnist-mini --out run --lr 0.05
    --batch 64 --microbatches 4 --epochs 40ba --reproducible --set threads=1 --set log_every=1ba --set ema.decay=0.8
    --set checkpoint.every=20ba --set optimizer.momentum=0.9 --set data.augment.crop=pad"""
AT_THE_END = ("checkpoints/step-00000040", "weights.safetensors", "evaluation.json", "summary.json", "report.html")


def remove(run: Path, *names: str) -> None:
    for path in (run / name for name in names):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def leave(folder: Path) -> None:
    """Write the archive anew, by the Convoy of today."""
    with pytest.MonkeyPatch.context() as patch, as_before():
        patch.chdir(folder)  # so that no place of this machine stands in it
        assert main(COMMAND.split()) == 0
    remove(folder / "run", "tensorboard", "report.html")
    with tarfile.open(ARCHIVE, "w:gz") as file:
        file.add(folder / "run", "run")
    shutil.rmtree(folder / "run")


def extract(folder: Path) -> Path:
    """The run, in a folder."""
    with tarfile.open(ARCHIVE) as file:
        file.extractall(folder, filter="data")
    return folder / "run"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    if RENEWING:
        leave(folder)
    return extract(folder)


@pytest.fixture
def run(stored: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stored, tmp_path / "run")


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_is_gone_on_with_to_the_same_end(run: Path, stored: Path, devices: int) -> None:
    remove(run, *AT_THE_END)
    command = ["train", str(run), "--resume", "--trust-code", *(["--devices", "2"] if devices == 2 else [])]
    assert run_ranks(train, devices, command, join=False) == [0] * devices
    assert unlike(numbers(run), numbers(stored)) == []


@pytest.mark.slow
def test_it_is_made_longer(run: Path, tmp_path: Path) -> None:
    command = ["train", str(run), "--trust-code", "--extend", "2ba", "--out", str(tmp_path / "longer")]
    assert run_ranks(train, 1, command, join=False) == [0]
    now = numbers(tmp_path / "longer")
    assert unlike(now, golden("runs.json", "stored, longer", now)) == []


def test_it_is_evaluated_and_loaded(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--json", "--trust-code"]) == 0
    now = json.loads(capsys.readouterr().out)[0]
    before = lines(run, "test")[-1]
    assert (now["loss"], now["top1"]) == pytest.approx((before["loss"], before["top1"]), rel=1e-6)
    net = convoy.load_run(run, trust_code=True).network
    assert sum(x.numel() for x in net.parameters()) == 532 and not net.training


def test_its_report_is_written_again(run: Path) -> None:
    assert main(["report", str(run)]) == 0
    assert "frozen.nets:Double" in (run / "report.html").read_text(encoding="utf-8")
