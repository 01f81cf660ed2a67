"""Recipes for ImageNet of today: resolutions and losses at points of the papers' formulae, and short runs of them."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from convoy.errors import ConvoyError
from convoy.training import Trainer, load_recipe
from convoy.training.classification import ClassificationLoss
from convoy.training.environment import join_ranks
from whole_runs import Console

CHECKOUT = Path(__file__).parents[2]
PHOTOGRAPHS = [folder / "shared/data/imagenet-sample" for folder in (CHECKOUT, *CHECKOUT.parents[:2])]


def test_resolutions_are_those_of_ffcv() -> None:
    """Linear between the two epochs, to the nearest multiple of 32; rn18_16_epochs.yaml and rn50_88_epochs.yaml."""
    want = {
        "imagenet-16": {0: 160, 10: 160, 11: 160, 12: 192, 13: 192, 15: 192},  # 176 is 5.5 · 32, and half goes to even
        "imagenet-88": {0: 160, 64: 160, 65: 160, 70: 160, 71: 192, 75: 192, 76: 192, 87: 192},
    }
    for name, sizes in want.items():
        data = load_recipe(name, ["data.path=x"]).data
        assert data.progressive is not None and data.image_size is not None
        assert {epoch: data.progressive.size(epoch, data.image_size) for epoch in sizes} == sizes
        assert data.progressive.sizes(data.image_size) == {160, 192}
    wide = load_recipe("imagenet-16", ["data.path=x", "data.progressive={from_size: 96, begin: 0, end: 4}"]).data
    assert wide.progressive is not None
    assert [wide.progressive.size(epoch, 192) for epoch in range(6)] == [96, 128, 128, 160, 192, 192]


def test_binary_cross_entropy_is_the_formula() -> None:
    """-t · log σ(x) - (1 - t) · log(1 - σ(x)), the mean over classes and samples."""
    logits = torch.linspace(-4, 4, 12, dtype=torch.float64).view(4, 3)
    labels, mixed = torch.tensor([0, 2, 1, 1]), torch.tensor([[0.9, 0.1, 0], [0.5, 0.5, 0], [0, 0.3, 0.7], [1, 0, 0]])

    def formula(present: Tensor) -> Tensor:
        return -(present * logits.sigmoid().log() + (1 - present) * (1 - logits.sigmoid()).log()).mean()

    one_hot = torch.eye(3, dtype=torch.float64)[labels]
    rows = [
        (ClassificationLoss(name="bce"), labels, one_hot),
        (ClassificationLoss(0.1, name="bce"), labels, 0.9 * one_hot + 0.1 / 3),
        (ClassificationLoss(name="bce"), mixed, mixed.double()),
        (ClassificationLoss(name="bce", target_threshold=0.2), mixed, (mixed > 0.2).double()),
    ]
    for loss, targets, present in rows:
        torch.testing.assert_close(loss(logits, targets), formula(present), rtol=1e-12, atol=0)
    half = ClassificationLoss(name="bce")(logits.bfloat16(), labels)
    assert half.dtype == torch.float32 and half.item() == pytest.approx(formula(one_hot).item(), rel=1e-2)


REFUSED = {
    "imagenet-90 data.evaluation_size=224 data.augment.crop=none": "evaluation_size would cut otherwise than resize",
    "imagenet-16 data.resize=200": "resize=200 is smaller than evaluation_size=256",
    "imagenet-16 data.progressive.end=10": "progressive.end=10 comes before progressive.begin=11",
    "imagenet-90 loss.target_threshold=0.2": "loss.target_threshold would be ignored with cross-entropy",
}


def test_options_that_mean_nothing_together_are_refused() -> None:
    for line, words in REFUSED.items():
        name, *changes = line.split()
        changes += ["data.augment.scale=null", "data.augment.ratio=null"] if "crop=none" in line else []
        with pytest.raises(ConvoyError, match=words):
            load_recipe(name, ["data.path=x", *changes])


TINY = ["epochs=2ba", "batch=6", "microbatch=3", "data.workers=0", "threads=2", "schedule.warmup=1ba"]
TINY += ["data.image_size=64", "data.evaluation_size=96", "data.resize=100", "precision=fp32", "model.name=resnet18"]


@pytest.mark.parametrize("name", ["imagenet-16", "imagenet-88", "imagenet-a2", "imagenet-a3"])
def test_a_recipe_trains_on_photographs(name: str, tmp_path: Path) -> None:
    photographs = next((folder for folder in PHOTOGRAPHS if folder.is_dir()), None)
    if photographs is None:
        pytest.skip("the photographs of ImageNet are not beside the checkout (shared/data/imagenet-sample)")
    if "-a" in name and importlib.util.find_spec("kornia") is None:
        pytest.skip("RandAugment needs the extra augment")
    changes = [*TINY, f"data.path={photographs}", "data.validation_fraction=0.02"]
    if "-a" not in name:
        changes += ["data.progressive={from_size: 32, begin: 0, end: 1}"]
    ranks, device = join_ranks()
    options = {"device": device, "ranks": ranks, "reporter": Console(None)}
    outcome = Trainer(load_recipe(name, changes), tmp_path / "run", **options).run()
    assert outcome.steps == 2 and outcome.top1 is not None
