"""The example's loop leaves, under every plan, the weights that the same loop in plain PyTorch leaves."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import convoy
from ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOP = ["--synthetic", "--dtype", "float64", "--epochs", "2", "--batch", "24", "--accumulate", "2"]
LOOP += ["--in-order", "--lr", "0.5"]


def run(script: str, out: Path, *options: str) -> str:
    """What a script prints, as `python examples/…` runs it."""
    argv = [script, *LOOP, "--out", str(out), *options]
    path = [str(EXAMPLES), *sys.path]
    with mock.patch.multiple(sys, argv=argv, path=path), contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return printed.getvalue()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the plain loop has left its weights, and what it printed."""
    out = tmp_path_factory.mktemp("plain")
    return out, run("classify_plain.py", out)


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The same of two ranks that divide the samples."""
    out = tmp_path_factory.mktemp("by-torchrun")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / "classify.py"), *LOOP, "--plan", "sample=2", "--out", str(out)]
    paths = [str(Path(convoy.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def difference(one: Path, other: Path) -> float:
    """The largest difference of weights and of averaged weights, relative to the largest number of each tensor."""
    pairs = zip(torch.load(one / "weights.pt"), torch.load(other / "weights.pt"), strict=True)
    worst = 0.0
    for state, want in pairs:
        assert list(state) == list(want)
        for name, tensor in state.items():
            worst = max(worst, ((tensor - want[name]).abs().max() / want[name].abs().max().clamp(min=1e-3)).item())
    return worst


@pytest.mark.slow
def test_under_torchrun(plain: tuple[Path, str], by_torchrun: tuple[Path, str]) -> None:
    assert difference(by_torchrun[0], plain[0]) < 1e-9
    assert by_torchrun[1] == plain[1]  # each line once
    assert len(plain[1].splitlines()) == 2


@pytest.mark.parametrize("plan", ["serial", "filter=2", "owt=2"])
def test_under_other_plans(plan: str, plain: tuple[Path, str], tmp_path: Path) -> None:
    world = 1 if plan == "serial" else 2
    printed = run_ranks(run, world, "classify.py", tmp_path, "--plan", plan, timeout=120)
    assert difference(tmp_path, plain[0]) < 1e-9
    assert printed == [plain[1], ""][:world]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["serial", "owt=2"])
def test_going_on_under_another_plan(
    plan: str, plain: tuple[Path, str], by_torchrun: tuple[Path, str], tmp_path: Path
) -> None:
    resume = ("--resume", str(by_torchrun[0] / "epoch-1"))
    printed = run_ranks(
        run, 1 if plan == "serial" else 2, "classify.py", tmp_path, "--plan", plan, *resume, timeout=120
    )
    assert difference(tmp_path, plain[0]) < 1e-9
    assert printed[0] == plain[1].splitlines(keepends=True)[1]


def test_other_updates_leave_other_weights(plain: tuple[Path, str], tmp_path: Path) -> None:
    run("classify_plain.py", tmp_path, "--batch", "48")
    assert difference(tmp_path, plain[0]) > 1e-3
