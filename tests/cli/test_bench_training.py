"""`convoy bench --train-epochs` on real processes: the curves of the trainer itself, stopped and gone on with."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from convoy.cli import main
from tiny import write_mnist

RECIPE = ["--batch", "8", "--set", "microbatch=2", "--set", "data.workers=0", "--set", "reproducible=true"]


def document(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    return found


@pytest.mark.slow
def test_curves_are_those_of_the_trainer_and_the_same_bits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    data, out, alone = write_mnist(tmp_path / "data"), tmp_path / "study", tmp_path / "alone"
    line = ["bench", "tiny:TinyNet", "--data", str(data), *RECIPE, "--devices", "1,2", "--plans", "sample"]
    line += ["--rounds", "0", "--train-epochs", "2", "--out", str(out)]
    assert main([*line, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    serial, two = told["convergence"]
    assert (serial["configuration"], two["configuration"]) == ("one device", "sample=2")
    assert two["distance_error"] == two["distance_loss"] == 0
    assert two["evaluations"] == 24 and two["updates"] == 24
    assert any("SHA-256" in sentence and "all 2 configurations" in sentence for sentence in told["remarks"])

    training = ["train", "tiny:TinyNet", "--data", str(data), *RECIPE, "--epochs", "2", "--out", str(alone)]
    assert main(training) == 0
    weights = (alone / "weights.safetensors").read_bytes()
    assert serial["weights_sha256"] == two["weights_sha256"] == hashlib.sha256(weights).hexdigest()

    for run in ("serial-on-1", "sample=2-on-2"):
        assert "<html" in (out / "training" / run / "report.html").read_text(encoding="utf-8")
    assert document(out)["sessions"][0]["wall_s"] >= document(out)["sessions"][0]["training_s"] > 0

    before = document(out)
    assert main([*line, "--json"]) == 0
    assert document(out)["configurations"] == before["configurations"]  # nothing is trained twice
    assert main([*line[:-3], "3", "--out", str(out)]) == 2
    assert "trainings of 2 epochs" in capfd.readouterr().err


@pytest.mark.slow
def test_stopped_it_goes_on_where_it_was(tmp_path: Path) -> None:
    data, out = write_mnist(tmp_path / "data", num_train=800), tmp_path / "study"
    line = [sys.executable, "-m", "convoy", "bench", "tiny:TinyNet", "--data", str(data), *RECIPE, "--devices", "1"]
    line += ["--plans", "sample", "--rounds", "0", "--train-epochs", "6", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "CONVOY_CACHE": str(tmp_path / "cache")}
    metrics = out / "training" / "serial-on-1" / "metrics.jsonl"
    process = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 100
    while not (metrics.exists() and metrics.read_text().count("test")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1, said
    assert "the same command goes on" in said
    summary = json.loads((metrics.parent / "summary.json").read_text())
    assert summary["status"] == "stopped" and 0 < summary["steps"] < summary["total_steps"]
    kept = document(out)["configurations"][0]["training"]
    assert kept["evaluations"] and not kept["finished"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    after = document(out)["configurations"][0]["training"]
    assert after["finished"] and len(after["evaluations"]) > len(kept["evaluations"])
    for one, two in zip(after["evaluations"], kept["evaluations"], strict=False):  # the last may have been done again
        assert one | {"train_s": 0} == two | {"train_s": 0}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--train-epochs 2", "name them with --data"),
        ("--train-epochs 0 --data mnist-mini", "--train-epochs is 0"),
        ("--train-epochs 1 --data mnist-mini --batch-per-device 8", "give --batch"),
        ("--rounds 0", "--rounds is 0"),
    ],
)
def test_mistakes_are_one_sentence(
    line: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "lenet", "--devices", "1", *line.split()]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
