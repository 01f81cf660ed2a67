"""Runs of the command line as real processes, in the background too."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from processes import children, variable

_PATH = filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(_PATH), "OMP_NUM_THREADS": "1"}


def command(data: Path, out: Path, *options: str, model: str = "tiny:TinyNet", epochs: str = "24ba") -> list[str]:
    settings = ["--set", "microbatch=3", "--set", "log_every=1ba", "--set", "data.augment.crop=pad"]
    fixed = ["--data", str(data), "--batch", "24", "--lr", "0.05", "--reproducible", "--epochs", epochs]
    return [sys.executable, "-m", "convoy", "train", model, *fixed, *settings, "--out", str(out), *options]


def resume(out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "convoy", "train", str(out), "--resume", *options]


def finish(arguments: list[str], status: int = 0) -> subprocess.CompletedProcess[str]:
    found = subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, text=True, timeout=150, check=False)
    assert found.returncode == status, found.stdout + found.stderr
    return found


class Started:
    """A run in the background, with the processes below it."""

    def __init__(self, arguments: list[str]) -> None:
        self.process = subprocess.Popen(
            arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def ranks(self) -> dict[int, int]:
        """Process numbers of the ranks."""
        found = {}
        for pid in children(self.process.pid):
            rank = variable(pid, "RANK")
            if rank is not None:
                found[int(rank)] = pid
        return found

    def end(self, timeout: float) -> tuple[str, str]:
        return self.process.communicate(timeout=timeout)


def wait_for(condition: Callable[[], bool], seconds: float) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not happen in time"
        time.sleep(0.02)
    return time.monotonic() - began


def steps(out: Path) -> int:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    whole = [line for line in lines if line.endswith("}")]
    return int(json.loads(whole[-1])["step"]) if whole else 0


def digest(out: Path) -> str:
    return hashlib.sha256((out / "weights.safetensors").read_bytes()).hexdigest()


def curve(out: Path) -> list[tuple[object, ...]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [tuple(line.get(key) for key in ("split", "step", "loss", "top1", "lr", "images")) for line in lines]
