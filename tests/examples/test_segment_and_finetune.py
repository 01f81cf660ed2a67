"""Segmentation and fine-tuning leave, under every plan, the weights that the same loops in plain PyTorch leave."""

import contextlib
import io
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
FLOAT64 = ["--dtype", "float64"]
SEGMENT = [*FLOAT64, "--epochs", "2", "--samples", "50", "--batch", "10"]
CLASSIFY = [*FLOAT64, "--synthetic", "--in-order", "--batch", "24"]


def run(script: str, *options: str) -> str:
    """What a script prints, as `python examples/…` runs it."""
    path = [str(EXAMPLES), *sys.path]
    with (
        mock.patch.multiple(sys, argv=[script, *options], path=path),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return printed.getvalue()


def difference(one: Path, other: Path) -> float:
    """The largest difference of weights, relative to the largest number of each tensor."""
    state, want = (torch.load(path / "weights.pt") for path in (one, other))
    assert list(state) == list(want)
    return max(((state[n] - want[n]).abs().max() / want[n].abs().max().clamp(min=1e-3)).item() for n in state)


@pytest.fixture(scope="module")
def segmented(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the plain segmentation has left its weights, and what it printed."""
    out = tmp_path_factory.mktemp("segmented")
    return out, run("segment_plain.py", *SEGMENT, "--out", str(out))


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the plain fine-tuning has left its weights, and what it printed; `classified/` holds what it began with."""
    out = tmp_path_factory.mktemp("finetuned")
    run("classify_plain.py", *CLASSIFY, "--epochs", "1", "--out", str(out / "classified"))
    return out, run("finetune_plain.py", *finetune(out), "--out", str(out))


def finetune(out: Path) -> list[str]:
    return [*CLASSIFY, "--epochs", "2", "--weights", str(out / "classified" / "weights.pt")]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("plan", ["serial", "sample=2", "height=2", pytest.param("filter=2", marks=SLOW)])
def test_segmentation(plan: str, segmented: tuple[Path, str], tmp_path: Path) -> None:
    world = 1 if plan == "serial" else 2
    printed = run_ranks(run, world, "segment.py", *SEGMENT, "--plan", plan, "--out", str(tmp_path), timeout=120)
    assert difference(tmp_path, segmented[0]) < 1e-9
    assert printed == [segmented[1], ""][:world]
    assert len(printed[0].splitlines()) == 2


@pytest.mark.parametrize("plan", ["serial", "sample=2", "owt=2"])
def test_fine_tuning(plan: str, finetuned: tuple[Path, str], tmp_path: Path) -> None:
    world = 1 if plan == "serial" else 2
    options = [*finetune(finetuned[0]), "--plan", plan, "--out", str(tmp_path)]
    printed = run_ranks(run, world, "finetune.py", *options, timeout=120)
    assert difference(tmp_path, finetuned[0]) < 1e-9
    assert printed == [finetuned[1], ""][:world]


def test_fine_tuning_leaves_frozen_weights_as_they_were(finetuned: tuple[Path, str]) -> None:
    before, _ = torch.load(finetuned[0] / "classified" / "weights.pt")
    after = torch.load(finetuned[0] / "weights.pt")
    same = [name for name in after if torch.equal(after[name], before[name])]
    assert same == [name for name in after if name.split(".")[0] in {"0", "1", "4"}]


def test_other_updates_leave_other_weights(segmented: tuple[Path, str], tmp_path: Path) -> None:
    run("segment_plain.py", *SEGMENT, "--lr", "0.01", "--out", str(tmp_path))
    assert difference(tmp_path, segmented[0]) > 1e-3
