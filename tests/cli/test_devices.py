"""Runs on several devices as real processes: the result of one device, and a clean end whatever happens."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiny import write_mnist

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}


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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("devices") / "data")


@pytest.fixture(scope="module")
def serial(data: Path) -> Path:
    finish(command(data, data.parent / "serial"))
    return data.parent / "serial"


class Started:
    """A run in the background, with the processes below it."""

    def __init__(self, arguments: list[str]) -> None:
        self.process = subprocess.Popen(
            arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def ranks(self) -> dict[int, int]:
        """Process numbers of the ranks."""
        found = {}
        for pid in below(self.process.pid):
            rank = variable(pid, "RANK")
            if rank is not None:
                found[int(rank)] = pid
        return found

    def end(self, timeout: float) -> tuple[str, str]:
        return self.process.communicate(timeout=timeout)


def below(parent: int) -> list[int]:
    children = []
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        children += [int(pid) for pid in task.read_text().split()]
    return children


def variable(pid: int, name: str) -> str | None:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((e.decode().partition("=")[2] for e in entries if e.startswith(f"{name}=".encode())), None)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not happen in time"
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.fixture
def start() -> Iterator[Callable[[list[str]], Started]]:
    runs: list[Started] = []

    def begin(arguments: list[str]) -> Started:
        runs.append(Started(arguments))
        return runs[-1]

    yield begin
    for run in runs:
        ranks = run.ranks().values() if run.process.poll() is None else []
        for pid in (*ranks, run.process.pid):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        run.process.communicate()


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


@pytest.mark.parametrize("options", [("--devices", "2"), ("--devices", "3", "--shares", "3,3,2")], ids=["2", "3,3,2"])
def test_the_run_is_that_of_one_device(serial: Path, data: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    out = tmp_path / "run"
    finish(command(data, out, *options))
    assert digest(out) == digest(serial)
    assert curve(out) == curve(serial)
    ours, theirs = (json.loads((path / "evaluation.json").read_text()) for path in (out, serial))
    assert ours == theirs
    assert json.loads((out / "summary.json").read_text())["devices"] == int(options[1])
    assert f"sample: {options[1]}" in (out / "plan.yaml").read_text()


def test_draws_outside_of_dropout_layers_are_those_of_one_device(data: Path, tmp_path: Path) -> None:
    for name, options in (("1", ""), ("2", "--devices 2"), ("3", "--devices 3 --shares 3,3,2")):
        finish(command(data, tmp_path / name, *options.split(), model="tiny:TinyDepth", epochs="6ba"))
    assert digest(tmp_path / "1") == digest(tmp_path / "2") == digest(tmp_path / "3")
    assert curve(tmp_path / "1") == curve(tmp_path / "2") == curve(tmp_path / "3")


def test_a_network_that_couples_samples_keeps_each_microbatch_on_one_device(data: Path, tmp_path: Path) -> None:
    model = "tiny:TinyCoupled"
    found = finish(command(data, tmp_path / "refused", "--devices", "2", model=model), status=2)
    assert "mean in the network itself computes with several samples at once" in found.stderr
    assert "e.g. filter=2, or batch_norm=sync" in found.stderr
    assert found.stderr.count("\n") == 1, found.stderr
    for name, options in (("1", ""), ("2", "--devices 2 --plan filter=2")):
        finish(command(data, tmp_path / name, *options.split(), model=model, epochs="4ba"))
    for one, two in zip(curve(tmp_path / "1"), curve(tmp_path / "2"), strict=True):
        assert one[:2] == two[:2]
        assert two[2] == pytest.approx(one[2], rel=1e-4)


def test_a_stopped_run_goes_on_by_another_plan_with_the_same_result(
    serial: Path, data: Path, tmp_path: Path, start: Callable[[list[str]], Started]
) -> None:
    out = tmp_path / "run"
    run = start(command(data, out, "--devices", "2"))
    wait_for(lambda: steps(out) >= 3, 60)
    run.process.send_signal(signal.SIGTERM)
    output, errors = run.end(60)
    assert run.process.returncode == 1, output + errors
    assert "SIGTERM: stopped and saved after" in output
    assert errors == ""
    assert json.loads((out / "summary.json").read_text())["status"] == "stopped"
    assert 3 <= steps(out) < 24
    finish(resume(out, "--devices", "3"))
    assert digest(out) == digest(serial)
    assert curve(out) == curve(serial)


def test_a_killed_rank_ends_the_run_and_resume_repairs_it(
    serial: Path, data: Path, tmp_path: Path, start: Callable[[list[str]], Started]
) -> None:
    out = tmp_path / "run"
    run = start(command(data, out, "--devices", "2", "--set", "checkpoint.every=2ba"))
    wait_for(lambda: steps(out) >= 5, 60)
    ranks = run.ranks()
    os.kill(ranks[1], signal.SIGKILL)
    output, errors = run.end(15)
    assert run.process.returncode == 1, output + errors
    assert errors.startswith("rank 1 failed: it was ended by SIGKILL"), errors
    assert not any(map(alive, ranks.values()))
    assert not list(out.rglob("*.tmp"))
    finish(resume(out))
    assert digest(out) == digest(serial)
    assert curve(out) == curve(serial)


def test_nothing_outlives_the_starting_process(
    data: Path, tmp_path: Path, start: Callable[[list[str]], Started]
) -> None:
    out = tmp_path / "run"
    run = start(command(data, out, "--devices", "2", "--workers", "1", epochs="2000ba"))
    wait_for(lambda: steps(out) >= 1, 180)
    everyone = [pid for rank in run.ranks().values() for pid in (rank, *below(rank))]
    assert len(everyone) > 2
    run.process.kill()
    run.process.wait()
    wait_for(lambda: not any(map(alive, everyone)), 30)


@pytest.mark.parametrize(
    ("model", "status", "beginning"),
    [
        ("failing:Failing", 1, "rank 1 failed: KeyError: 'the odd key'\nTraceback"),
        ("failing:Mistaken", 2, "convoy: rank 1 finds the data wanting: mend it\n"),
    ],
)
def test_a_failure_on_one_rank_is_said_once(
    data: Path, tmp_path: Path, model: str, status: int, beginning: str
) -> None:
    began = time.monotonic()
    found = finish(command(data, tmp_path / "run", "--devices", "2", model=model), status)
    assert found.stderr.startswith(beginning), found.stderr
    assert found.stderr.count("failed: ") == (status == 1)
    assert time.monotonic() - began < 60
    assert not (tmp_path / "run").exists()


def test_torchrun_is_joined(serial: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    _, _, _, _, *arguments = command(data, out)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finish([*torchrun, "-m", "convoy", "train", *arguments])
    assert digest(out) == digest(serial)
    found = subprocess.run(
        [*torchrun, "-m", "convoy", "train", *arguments, "--devices", "3"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "--devices 3 contradicts torchrun, which started 2 ranks" in found.stderr


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--devices", "0"], "parallel.devices is 0"),
        (["--devices", "9"], "8 microbatches of a batch of 24 cannot be divided over 9 devices"),
        (["--devices", "2", "--plan", "sample=3"], "the plan sample=3 is for 3 devices, but 2 run"),
        (["--devices", "2", "--shares", "1,2,3"], "--shares names 3 devices"),
        (["--devices", "2", "--cores-per-device", "999"], "needs 1998 cores"),
        (["--devices", "2", "--local-sgd", "4"], "reproducible gives the same weights on any number of devices"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(data: Path, tmp_path: Path, options: list[str], word: str) -> None:
    found = finish(command(data, tmp_path / "run", *options), status=2)
    assert word in found.stderr
    assert found.stderr.count("\n") == 1, found.stderr
