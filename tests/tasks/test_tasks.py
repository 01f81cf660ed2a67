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

from convoy.data.batch import Batch
from convoy.models.unet import UNet
from convoy.tasks.classification import Classification
from convoy.tasks.multi_label import MultiLabel, average_precision
from convoy.tasks.regression import Regression
from convoy.tasks.segmentation import Segmentation
from convoy.tasks.task import Task, kept_of
from convoy.training.evaluation import InputPipeline
from ranks import run_ranks
from training.scenarios import cores_as_before, session
from whole_runs import train_here

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
        label = {"classification": f"kind {kind}", "regression": f"{kind}.5,1"}
        label["multi-label"] = ["a", "a;b", "b;c"][kind]
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
    settings = [f"model.name=tasks.test_tasks:{net}", "data.image_size=16"]
    settings += ["loss.name=cross-entropy+dice"] if task == "segmentation" else []
    serial = run_ranks(trained, 1, data, settings, False)[0]

    def off(plan: str, mistake: bool = False) -> float:
        found = run_ranks(trained, 2, data, [*settings, *PLANS[plan], f"parallel.plan={plan}"], mistake)[0]
        return max(float((found[name] - serial[name]).abs().max() / serial[name].abs().max()) for name in serial)

    assert max(map(off, PLANS)) < 1e-9
    assert off("sample=2", mistake=True) > 1e-5


def all_metrics(data: Path, settings: list[str]) -> tuple[dict[str, float], int]:
    """The metrics of the first weights, and the number of rows of its classes."""
    with cores_as_before():
        found = session(data, "batch=12", "microbatch=3", "data.workers=0", "data.image_size=16", *settings)
        result = found.evaluate()
        return result.metrics(), len(result.per_class(found.data.classes))


@pytest.mark.parametrize("task", TASKS)
def test_a_metric_of_ones_own_stands_beside_those_of_the_task(task: str, tmp_path: Path) -> None:
    data = write_task(tmp_path / task, task)
    (tmp_path / "mine.py").write_text("def samples(outputs, targets):\n    return len(outputs)\n")
    settings = [f"model.name=tasks.test_tasks:{'TinyUNet' if task == 'segmentation' else 'TinyTask'}"]
    metrics, rows = run_ranks(all_metrics, 1, data, settings)[0]
    settings.append(f"metrics=[{tmp_path / 'mine.py'}:samples]")
    for found, rows_too in run_ranks(all_metrics, 2, data, settings):
        assert found == pytest.approx(metrics | {"samples": HELD_OUT}, rel=1e-9) and rows_too == rows > 0


def digest(data: Path, out: Path, mistake: bool) -> str:
    """Of the weights of a run with class weights; by a `mistake` their sum over pixels hangs on the devices."""
    settings = {"model.name": "tasks.test_tasks:TinyUNet", "data.image_size": "16", "batch": "12", "epochs": "6ba"}
    settings |= {"reproducible": "true", "data.augment.crop": "none", "data.workers": "0"}
    settings |= {"loss.class_weights": "{'0': 0.3, '2': 1.7}"}
    with ExitStack() as stack:
        if mistake:
            summed = lambda self, targets: self._pixel_weights(targets.long()).sum(dtype=torch.float64)  # noqa: E731
            stack.enter_context(patch.object(Segmentation, "count", summed))
            stack.enter_context(patch.object(Segmentation, "weighed", lambda self, count: count))
        return train_here(data, out, settings).digest


def test_class_weights_of_pixels_are_reproducible_to_the_last_bit(tmp_path: Path) -> None:
    data = write_task(tmp_path / "data", "segmentation")
    one, two, other = (
        run_ranks(digest, num, data, tmp_path / f"{num}{mistake}", mistake)[0]
        for num, mistake in ((1, False), (2, False), (2, True))
    )
    assert one == two != other


def evaluated(task: Task, outputs: Tensor, targets: Tensor, num_parts: int) -> dict[str, float]:
    """The metrics of samples in batches of 3 at which some ranks take turns."""
    parts = [task.evaluation() for _ in range(num_parts)]
    numbers, images = torch.arange(len(outputs)), torch.zeros(len(outputs), 1, *outputs.shape[2:], dtype=torch.uint8)
    for turn, chosen in enumerate(numbers.split(3)):
        parts[turn % num_parts].add(Batch(images[chosen], targets[chosen], chosen), outputs[chosen])
    return parts[0].total(parts).metrics()


def test_metrics_are_their_formulas_for_any_number_of_parts() -> None:
    outputs, values = torch.randn(12, 3, generator=torch.manual_seed(0)).double(), torch.randn(12, 3)
    labels = (values > 0).float()
    ranked = [labels[outputs[:, c].argsort(descending=True), c] for c in range(3)]
    precisions = [sum(r[: i + 1].mean() for i in r.nonzero().flatten().tolist()) / r.sum() for r in ranked]
    right = (outputs > 0) & labels.bool()
    both = (outputs > 0).sum(0) + labels.sum(0)
    multi_label = {"map": sum(precisions) / 3, "f1": 2 * right.sum() / both.sum()}
    multi_label |= {"macro_f1": (2 * right.sum(0) / both).mean()}
    error = outputs - values.double()
    r2 = (1 - error.square().sum(0) / (values.double() - values.double().mean(0)).square().sum(0)).mean()
    regression = {"mae": error.abs().mean(), "mse": error.square().mean(), "r2": r2}
    maps, masks = torch.randn(12, 3, 4, 4), torch.randint(0, 3, (12, 4, 4), dtype=torch.uint8)
    masks[:, 0] = 255
    said, true = maps.argmax(1)[:, 1:], masks[:, 1:]
    sides = [((said == c) & (true == c), (said == c) | (true == c)) for c in range(3)]
    segmentation = {"iou": sum(one.sum() / other.sum() for one, other in sides) / 3}
    segmentation |= {"dice": sum(2 * one.sum() / (one.sum() + other.sum()) for one, other in sides) / 3}
    segmentation |= {"pixel_accuracy": (said == true).double().mean()}
    for task, given, targets, wanted in (
        (MultiLabel("abc"), outputs, labels, multi_label),
        (Regression("abc"), outputs, values, regression),
        (Segmentation("abc"), maps, masks, segmentation),
    ):
        found = evaluated(task, given, targets, 1)
        assert {name: found[name] for name in wanted} == pytest.approx({k: float(v) for k, v in wanted.items()})
        assert evaluated(task, given, targets, 2) == found  # to the last bit
        assert found["loss"] == pytest.approx(float(task.loss(given, targets)), rel=1e-6)
    tied = torch.tensor([0.5, 0.5, 0.1]), torch.tensor([True, False, True])
    assert average_precision(*tied) == pytest.approx(1 / 2 * 1 / 2 + 2 / 3 * 1 / 2)


def test_class_weights_and_dice_have_their_formulas() -> None:
    logits, labels, weights = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 0]), torch.tensor([1.0, 2.0, 4.0])
    task = Classification("abc", class_weights=weights)
    parts = [task.loss(logits[part], labels[part]) * len(labels[part]) for part in (slice(2), slice(2, 6))]
    terms = F.cross_entropy(logits, labels, reduction="none") * weights[labels]  # torch's mean differs with the parts
    torch.testing.assert_close((parts[0] + parts[1]) / 6, terms.mean())
    assert task.count(labels) is None
    half = logits.bfloat16()
    torch.testing.assert_close(task.loss(half, labels), task.loss(half.float(), labels), rtol=0, atol=0)
    fine = Classification("abc", class_weights=torch.tensor([1.0039, 0.9961, 1.003], dtype=torch.float64))
    torch.testing.assert_close(fine.loss(half, labels), fine.loss(half.float(), labels), rtol=0, atol=0)
    maps, masks = torch.randn(2, 3, 4, 4), torch.randint(0, 2, (2, 4, 4))
    chances, there = maps.softmax(1), F.one_hot(masks, 3).permute(0, 3, 1, 2)
    scores = 2 * (chances * there).sum((2, 3)) / (chances + there).sum((2, 3))
    wanted = 1 - scores[:, :2].mean()  # class 2 is nowhere
    torch.testing.assert_close(Segmentation("abc", loss_name="dice").loss(maps, masks), wanted)
    unlabelled = Segmentation("abc").loss(maps, torch.full((2, 4, 4), 255))
    kept, _ = kept_of(maps, masks.byte())
    assert kept.dtype == torch.uint8 and torch.equal(kept.long(), maps.argmax(1))
    assert unlabelled == 0 and Segmentation("abc").count(torch.full((2, 4, 4), 255)) == 0
