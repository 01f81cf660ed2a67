"""Runs on several devices as real processes: the result of one device, and a clean end whatever happens."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from convoy.cli import main
from processes import alive, children
from started import Started, command, curve, digest, finish, resume, steps, wait_for
from tiny import write_mnist


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("devices") / "data")


@pytest.fixture(scope="module")
def serial(data: Path) -> Path:
    finish(command(data, data.parent / "serial"))
    return data.parent / "serial"


@pytest.mark.slow
def test_the_run_is_that_of_one_device(serial: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    finish(command(data, out, "--devices", "3", "--shares", "3,3,2"))
    assert digest(out) == digest(serial)
    assert curve(out) == curve(serial)
    ours, theirs = (json.loads((path / "evaluation.json").read_text()) for path in (out, serial))
    assert ours == theirs
    assert json.loads((out / "summary.json").read_text())["devices"] == 3
    assert "sample: 3" in (out / "plan.yaml").read_text()


@pytest.mark.slow
def test_draws_outside_of_dropout_layers_are_those_of_one_device(data: Path, tmp_path: Path) -> None:
    for name, options in (("1", ""), ("3", "--devices 3 --shares 3,3,2")):
        finish(command(data, tmp_path / name, *options.split(), model="tiny:TinyDepth", epochs="6ba"))
    assert digest(tmp_path / "1") == digest(tmp_path / "3")
    assert curve(tmp_path / "1") == curve(tmp_path / "3")


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.matrix  # tests/cli/test_elastic.py kills a rank and goes on, too
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
    finish(resume(out))
    assert not list(out.rglob("*.tmp"))
    assert digest(out) == digest(serial)
    assert curve(out) == curve(serial)


@pytest.mark.slow
def test_nothing_outlives_the_starting_process(
    data: Path, tmp_path: Path, start: Callable[[list[str]], Started]
) -> None:
    out = tmp_path / "run"
    run = start(command(data, out, "--devices", "2", "--workers", "1", epochs="2000ba"))
    wait_for(lambda: steps(out) >= 1, 180)
    everyone = [pid for rank in run.ranks().values() for pid in (rank, *children(rank))]
    assert len(everyone) > 2
    run.process.kill()
    run.process.wait()
    wait_for(lambda: not any(map(alive, everyone)), 30)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "status", "beginning"),
    [
        ("failing:Failing", 1, "rank 1 failed: KeyError: 'the odd key' (failing.py, line 22, in train)\nTraceback"),
        ("failing:Mistaken", 2, "convoy: rank 1 finds the data wanting: mend it\n"),
        ("failing:Lacking", 2, "convoy: rank 1 ran out of memory (before the first update"),
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


@pytest.mark.slow
def test_torchrun_is_joined(serial: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    _, _, _, _, *arguments = command(data, out)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finish([*torchrun, "-m", "convoy", "train", *arguments])
    assert digest(out) == digest(serial)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--devices", "0"], "--devices is 0"),
        (["--devices", "3", "--batch", "6"], "a batch of 6 is 2 microbatches, and 3 devices need 3"),
        (["--devices", "2", "--plan", "sample=3"], "the plan sample=3 is for 3 devices, but 2 run"),
        (["--devices", "2", "--shares", "1,2,3"], "--shares names 3 parts"),
        (["--devices", "2", "--cores-per-device", "999"], "needs 1998 cores"),
        (["--devices", "2", "--local-sgd", "4"], "reproducible gives the same weights on any number of devices"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(
    data: Path, tmp_path: Path, options: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, _, *line = command(data, tmp_path / "run", *options)
    assert main(line) == 2
    said = capsys.readouterr().err
    assert word in said
    *turns, _ = said.splitlines()
    assert all("compute in turns" in line for line in turns), said
