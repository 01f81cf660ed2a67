"""The examples in the docstrings of public names run, on two ranks."""

import copy
import doctest
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import convoy
from convoy.cli import main
from ranks import run_ranks

# Not `train`, which starts ranks of its own: the commands of its page in the cookbook are run, and a notebook.
NAMES = sorted(name for name in dir(convoy) if not name.startswith("_") and name != "train")
PARTS = 3


class _Lenient(doctest.OutputChecker):
    """For ranks that print other things than the docstring says of rank 0."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return True


def plain() -> nn.Module:
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), pool, nn.Linear(32, 10))


def surroundings() -> dict[str, Any]:
    """What a docstring's examples may use."""
    torch.manual_seed(0)
    model, images, labels = plain(), torch.randn(8, 3, 8, 8), torch.arange(8)
    net = convoy.parallelize(copy.deepcopy(model), "sample=2", example=images[:4])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    values = {"model": model, "net": net, "images": images, "labels": labels, "optimizer": optimizer}
    values |= {"build_model": plain, "mine": convoy.local_samples(net, len(images)), "plain": copy.deepcopy(model)}
    values |= {"dataset": TensorDataset(images, labels), "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    return {"DataLoader": DataLoader, "F": F, "convoy": convoy, "torch": torch} | values


def faults(names: list[str], folder: Path) -> list[str]:
    """Run the examples of docstrings on this rank; what went wrong."""
    os.chdir(folder)
    texts: list[str] = []
    for name in names:
        text = inspect.getdoc(getattr(convoy, name)) or ""
        test = doctest.DocTestParser().get_doctest(text, surroundings(), name, None, None)
        texts += [] if test.examples else [f"{name} has no example"]
        runner = doctest.DocTestRunner(checker=None if convoy.rank() == 0 else _Lenient(), verbose=False)
        runner.run(test, out=texts.append)
    return texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that tells dark cats from bright dogs, and a picture of each."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("docstrings")
    for number in range(24):
        for name, shade in ("cat", 10), ("dog", 200):
            path = folder / "data" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (28, 28), (shade + number,) * 3).save(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        options = ["--batch", "8", "--epochs", "4", "--device", "cpu", "--lr", "0.02", "--out", "runs/first"]
        assert main(["train", "lenet", "--data", "data", *options, "--set", "threads=1"]) == 0
    for name in ("cat", "dog"):
        (folder / "data" / name / "0.png").rename(folder / f"{name}.png")
    return folder


@pytest.mark.parametrize("part", range(PARTS))
def test_examples_of_public_names(part: int, folder: Path) -> None:
    assert run_ranks(faults, 2, NAMES[part::PARTS], folder, timeout=150) == [[], []]
