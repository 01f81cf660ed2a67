"""Every task on devices with parts of other sizes is that of one device, and is evaluated as its formulas say."""

from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from convoy.models.unet import UNet
from convoy.training.evaluation import InputPipeline
from ranks import run_ranks
from training.scenarios import cores_as_before, session

NUM, HELD_OUT = 24, 10
PLANS = {"sample=2": ["parallel.shares=[3,1]"], "filter=2": [], "height=2": [], "stage=2": []}
TASKS = ("classification", "multi-label", "regression", "segmentation")


def write_task(folder: Path, task: str) -> Path:
    """Made pictures of 16 pixels, whose brightness says what is on them, with labels.csv."""
    folder.mkdir(parents=True)
    random, rows = np.random.default_rng(0), ["path,width,height,split" if task == "regression" else "path,label,split"]
    for number in range(NUM + HELD_OUT):
        kind, noise = number % 3, random.integers(0, 60, (16, 16))
        Image.fromarray((noise + 60 * kind).astype(np.uint8)).save(folder / f"{number}.png")
        label = {
            "classification": f"kind {kind}",
            "multi-label": ["a", "a;b", "b;c"][kind],
            "regression": f"{kind}.5,1",
        }
        if task == "segmentation":
            mask = (noise > 30).astype(np.uint8) + (noise > 50)
            mask[: 3 * kind + number % 2] = 255  # as many as no other share has
            Image.fromarray(mask).save(folder / f"{number}-mask.png")
        split = "train" if number < NUM else "val"
        rows.append(f"{number}.png,{label.get(task, f'{number}-mask.png')},{split}")
    (folder / "labels.csv").write_text("\n".join(rows))
    return folder / "labels.csv"


class TinyTask(nn.Module):
    """Computes in float64."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(in_channels, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, num_classes)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(F.relu(self.norm(self.conv(x.double()))).mean((2, 3)))
        return logits


class TinyUNet(UNet):
    """Computes in float64."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__(num_classes=num_classes, in_channels=in_channels, width=2, depth=1)
        self.double()

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.double())


def trained(data: Path, settings: list[str], mistake: bool) -> dict[str, Tensor]:
    """Weights, losses and metrics after five updates; by a `mistake` a device takes its own mean, or other targets."""
    with cores_as_before(), ExitStack() as stack:
        found = session(data, "batch=12", "microbatch=3", "data.workers=0", "data.augment.flip=true", *settings)
        if mistake and found.task.count(torch.zeros(1, 1, 1, dtype=torch.int64)) is not None:
            stack.enter_context(patch.object(type(found.task), "count", lambda *_: None))
        elif mistake and found.ranks.rank:
            targets = InputPipeline.targets
            stack.enter_context(patch.object(InputPipeline, "targets", lambda *args: targets(*args).flip(0)))
        found.model.train()
        step, losses = found.step(), torch.zeros(5, dtype=torch.float64)
        for number, batch in enumerate(found.batches(0, 5)):
            losses[number] = sum(float(loss) for loss in step(batch, number).losses)
        parts = found.ranks.of_parts(found.ranks.gather(losses))
        weights = {f"weight {number}": whole for number, whole in enumerate(found.state.whole_weights()[1])}
        metrics = torch.tensor([*found.evaluate().metrics().values()], dtype=torch.float64)
        return weights | {"losses": torch.stack(parts).sum(0), "metrics": metrics}


@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_that_of_one_device(task: str, tmp_path: Path) -> None:
    data = write_task(tmp_path / task, task)
    net = "TinyUNet" if task == "segmentation" else "TinyTask"
    settings = [f"model.name=training.test_tasks:{net}", "data.image_size=16"]
    settings += ["loss.name=cross-entropy+dice"] if task == "segmentation" else []
    serial = run_ranks(trained, 1, data, settings, False)[0]

    def off(plan: str, mistake: bool = False) -> float:
        found = run_ranks(trained, 2, data, [*settings, *PLANS[plan], f"parallel.plan={plan}"], mistake)[0]
        return max(float((found[name] - serial[name]).abs().max() / serial[name].abs().max()) for name in serial)

    assert max(map(off, PLANS)) < 1e-9
    assert off("sample=2", mistake=True) > 1e-5
