"""A run that is killed again and again ends with the weights of the run that was left alone. Real processes."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiny import write_mnist

UPDATES = 60


def command(data: Path, out: Path) -> list[str]:
    settings = {"checkpoint.every": "4ba", "log_every": "1ba", "threads": "1", "data.augment.crop": "pad"}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    options = ["--data", str(data), "--batch", "24", "--epochs", f"{UPDATES}ba", "--out", str(out), *sets]
    return [sys.executable, "-m", "convoy", "train", "tiny:TinyNet", *options]


def steps(out: Path) -> int:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    whole = [line for line in lines if line.endswith("}")]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def kill_at(step: int, arguments: list[str], out: Path, environment: dict[str, str]) -> None:
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 100
        while steps(out) < step and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"


def digest(out: Path) -> str:
    return hashlib.sha256((out / "weights.safetensors").read_bytes()).hexdigest()


def curve(out: Path) -> list[tuple[object, ...]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [tuple(line.get(key) for key in ("split", "step", "loss", "top1", "lr")) for line in lines]


@pytest.mark.slow
def test_killed_at_three_random_steps(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    data = write_mnist(tmp_path / "data")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run(command(data, whole), env=environment, check=True, stdout=subprocess.DEVNULL, timeout=120)
    when = sorted(random.sample(range(3, UPDATES - 6), 3))
    for step in when:
        kill_at(step, [*command(data, parts), "--resume"], parts, environment)
    last = subprocess.run(
        [sys.executable, "-m", "convoy", "train", str(parts), "--resume"],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "going on after" in last.stdout
    assert digest(parts) == digest(whole), f"killed at {when}"
    assert curve(parts) == curve(whole), f"killed at {when}"
