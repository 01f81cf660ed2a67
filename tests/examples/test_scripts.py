"""The examples leave, under every plan, the weights that the same loops in plain PyTorch leave."""

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
CLASSIFY = ["--synthetic", "--dtype", "float64", "--in-order", "--epochs", "2", "--batch", "24"]
LOOP = [*CLASSIFY, "--accumulate", "2", "--lr", "0.5"]
SEGMENT = ["--dtype", "float64", "--epochs", "2", "--samples", "50", "--batch", "10"]


def run(script: str, *options: str) -> str:
    """What a script prints, as `python examples/…` runs it."""
    argv, path = [script, *options], [str(EXAMPLES), *sys.path]
    with mock.patch.multiple(sys, argv=argv, path=path), contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return printed.getvalue()


def difference(one: Path, other: Path) -> float:
    """The largest difference of weights, and of averaged weights if any, relative to the largest number of a tensor."""
    pair = [torch.load(path / "weights.pt") for path in (one, other)]
    states, wanted = (each if isinstance(each, list | tuple) else [each] for each in pair)
    worst = 0.0
    for state, want in zip(states, wanted, strict=True):
        assert list(state) == list(want)
        for name, tensor in state.items():
            worst = max(worst, ((tensor - want[name]).abs().max() / want[name].abs().max().clamp(min=1e-3)).item())
    return worst


class Plain:
    """A script in plain PyTorch, run to its end: where it left its weights, and what it printed."""

    def __init__(self, script: str, options: list[str], out: Path) -> None:
        self.script, self.options, self.out = script, options, out
        self.printed = run(script.replace(".", "_plain."), *options, "--out", str(out))

    def check(self, plan: str, out: Path, *more: str) -> None:
        """Under a plan the script leaves the same weights and prints the same lines, each once."""
        world = 1 if plan == "serial" else 2
        options = [*self.options, *more, "--plan", plan, "--out", str(out)]
        printed = run_ranks(run, world, self.script, *options, timeout=120)
        assert difference(out, self.out) < 1e-9
        lines = self.printed.splitlines(keepends=True)
        assert printed == ["".join(lines[1:] if more else lines), ""][:world] and len(lines) == 2


@pytest.fixture(scope="module")
def classification(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain("classify.py", LOOP, tmp_path_factory.mktemp("classified"))


@pytest.fixture(scope="module")
def segmentation(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain("segment.py", SEGMENT, tmp_path_factory.mktemp("segmented"))


@pytest.mark.parametrize("plan", ["serial", "filter=2", "owt=2"])
def test_classification_also_goes_on_under_another_plan(plan: str, classification: Plain, tmp_path: Path) -> None:
    classification.check(plan, tmp_path)
    classification.check("sample=2", tmp_path / "again", "--resume", str(tmp_path / "epoch-1"))


@pytest.mark.parametrize("plan", ["sample=2", "height=2"])
def test_segmentation(plan: str, segmentation: Plain, tmp_path: Path) -> None:
    segmentation.check(plan, tmp_path)


def test_fine_tuning_leaves_frozen_weights_as_they_were(tmp_path: Path) -> None:
    before = tmp_path / "classified"
    run("classify_plain.py", *CLASSIFY, "--epochs", "1", "--out", str(before))
    tuning = Plain("finetune.py", [*CLASSIFY, "--weights", str(before / "weights.pt")], tmp_path)
    for plan in ("sample=2", "owt=2"):
        tuning.check(plan, tmp_path / plan)
    weights, _ = torch.load(before / "weights.pt")
    after = torch.load(tmp_path / "weights.pt")
    same = [name for name in after if torch.equal(after[name], weights[name])]
    assert same == [name for name in after if name.split(".")[0] in {"0", "1", "4"}]


def test_other_updates_leave_other_weights(classification: Plain, segmentation: Plain, tmp_path: Path) -> None:
    run("classify_plain.py", *LOOP, "--batch", "48", "--out", str(tmp_path / "a"))
    run("segment_plain.py", *SEGMENT, "--lr", "0.01", "--out", str(tmp_path / "b"))
    assert difference(tmp_path / "a", classification.out) > 1e-3
    assert difference(tmp_path / "b", segmentation.out) > 1e-3
