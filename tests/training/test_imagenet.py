"""Recipes for ImageNet of today: resolutions and losses at points of the papers' formulae, and short runs of them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from convoy.recipe.recipe import load_recipe
from convoy.tasks.classification import Classification
from convoy.training import Trainer
from convoy.training.environment import join_ranks
from convoy.training.restore import load_run
from convoy.training.watchdog import Watchdog
from whole_runs import Console

CHECKOUT = Path(__file__).parents[2]
PHOTOGRAPHS = [folder / "shared/data/imagenet-sample" for folder in (CHECKOUT, *CHECKOUT.parents[:2])]

SIZES = {  # rn18_16_epochs.yaml, rn50_88_epochs.yaml: in a line, to the nearest multiple of 32, half to the even one
    "imagenet-16": {0: 160, 10: 160, 11: 160, 12: 192, 13: 192, 15: 192},
    "imagenet-88": {0: 160, 64: 160, 65: 160, 70: 160, 71: 192, 75: 192, 76: 192, 87: 192},
    "imagenet-16 data.progressive.from_size=96 data.progressive.begin=0 data.progressive.end=3": {
        0: 96,
        1: 128,
        2: 160,
    },
}


def test_resolutions_are_those_of_ffcv() -> None:
    for line, sizes in SIZES.items():
        name, *changes = line.split()
        data = load_recipe(name, ["data.path=x", *changes]).data
        assert data.progressive is not None
        assert {epoch: data.progressive.size(epoch, 192) for epoch in sizes} == sizes
        assert data.progressive.sizes(192) == {*sizes.values(), 192}


def test_binary_cross_entropy_is_the_formula() -> None:
    """-t · log σ(x) - (1 - t) · log(1 - σ(x)), the mean over classes and samples."""
    logits = torch.linspace(-4, 4, 12, dtype=torch.float64).view(4, 3)
    labels, mixed = torch.tensor([0, 2, 1, 1]), torch.tensor([[0.9, 0.1, 0], [0.5, 0.5, 0], [0, 0.3, 0.7], [1, 0, 0]])
    one_hot = torch.eye(3, dtype=torch.float64)[labels]

    def formula(present: Tensor) -> Tensor:
        return -(present * logits.sigmoid().log() + (1 - present) * (1 - logits.sigmoid()).log()).mean()

    for options, targets, present in (
        ({}, labels, one_hot),
        ({"label_smoothing": 0.1}, labels, 0.9 * one_hot + 0.1 / 3),
        ({}, mixed, mixed.double()),
        ({"target_threshold": 0.2}, mixed, (mixed > 0.2).double()),
    ):
        task = Classification(range(3), loss_name="bce", **options)
        torch.testing.assert_close(task.loss(logits, targets), formula(present), rtol=1e-12, atol=0)


TINY = ["epochs=2ba", "batch=6", "microbatch=3", "data.workers=0", "threads=2", "schedule.warmup=1ba"]
TINY += ["data.image_size=64", "data.evaluation_size=96", "data.resize=100", "precision=fp32", "model.name=resnet18"]
GROWING = ["data.progressive={from_size: 32, begin: 0, end: 1}"]


@pytest.mark.parametrize("name", ["imagenet-16", "imagenet-88", "imagenet-a2", "imagenet-a3"])
def test_a_recipe_trains_on_photographs(name: str, tmp_path: Path) -> None:
    photographs = next((folder for folder in PHOTOGRAPHS if folder.is_dir()), None)
    if photographs is None:
        pytest.skip("the photographs of ImageNet are not beside the checkout (shared/data/imagenet-sample)")
    if "-a" in name:
        pytest.importorskip("kornia", reason="RandAugment needs the extra augment")
    changes = [*TINY, f"data.path={photographs}", "data.validation_fraction=0.02"]
    changes += GROWING if "-a" not in name else []
    (ranks, device), out = join_ranks(), tmp_path / "run"
    with Watchdog(ranks, None) as dog:
        here = {"device": device, "ranks": ranks, "watchdog": dog, "reporter": Console(None)}
        outcome = Trainer(load_recipe(name, changes), out, **here).run()
    run = load_run(out)
    assert outcome.steps == 2 and not run.changed
    assert run.transform(next(photographs.rglob("*.JPEG"))).shape == (3, 96, 96)
