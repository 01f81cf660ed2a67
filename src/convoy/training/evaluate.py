"""Exact evaluation: every sample counts once, whatever the batches are."""

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from convoy.data import Batch
from convoy.training.files import write_atomically
from convoy.training.loss import heads

NUM_MISTAKES = 24


@dataclass(order=True)
class Mistake:
    """A sample that the network got wrong; `picture` is what the network saw, uint8 [channels, height, width]."""

    probability: float
    sample: int
    label: int = field(compare=False)
    predicted: int = field(compare=False)
    picture: Tensor = field(compare=False, repr=False)


@dataclass
class Evaluation:
    """What a network does on a whole split.

    Attributes:
        loss: mean cross-entropy over all samples.
        top1, top5: shares of samples, 0 to 1; top5 is None for five classes or fewer.
        confusion: int64 [classes, classes], true labels in rows.
        mistakes: wrong answers, the most confident first.
        bad: samples that could not be read, with the reason; they count nowhere.
    """

    num_images: int
    loss: float
    top1: float
    top5: float | None
    confusion: Tensor
    mistakes: list[Mistake]
    bad: list[tuple[int, str]]
    seconds: float

    def save(self, run: Path, classes: list[str], name: Callable[[int], str]) -> dict[str, Any]:
        """Write the pictures of the mistakes and return what goes into `evaluation.json`."""
        folder = run / "mistakes"
        folder.mkdir(exist_ok=True)
        rows = []
        for index, mistake in enumerate(self.mistakes):
            picture = folder / f"{index:02d}.png"
            write_atomically(picture, partial(_save_png, mistake.picture))
            rows.append(
                {
                    "sample": mistake.sample,
                    "name": name(mistake.sample),
                    "label": mistake.label,
                    "predicted": mistake.predicted,
                    "probability": mistake.probability,
                    "picture": f"mistakes/{index:02d}.png",
                }
            )
        return {
            "classes": classes,
            "confusion": self.confusion.tolist(),
            "images": self.num_images,
            "top1": self.top1,
            "top5": self.top5,
            "loss": self.loss,
            "mistakes": rows,
        }


def evaluate(
    model: nn.Module, batches: Iterable[Batch], to_input: Callable[[Batch], Tensor], num_classes: int, autocast: Any
) -> Evaluation:
    """Run the network in evaluation mode over all batches.

    Args:
        model: the network; its mode is put back afterwards.
        batches: every sample of the split once.
        to_input: moves a batch's images to the device and normalises them.
        num_classes: size of the confusion matrix.
        autocast: makes the context in which the forward pass runs.
    """
    start = time.perf_counter()
    confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
    loss, top5, bad = 0.0, 0, []
    worst: list[Mistake] = []
    with evaluating(model), torch.inference_mode():
        for batch in batches:
            bad += batch.bad
            if len(batch.labels) == 0:
                continue
            with autocast():
                outputs = model(to_input(batch))
            logits = heads(outputs)[0].float().cpu()
            loss += F.cross_entropy(logits, batch.labels, reduction="sum").item()
            if num_classes > 5:
                top5 += int((logits.topk(5).indices == batch.labels[:, None]).sum())
            probability, predicted = logits.softmax(1).max(1)
            pairs = batch.labels * num_classes + predicted
            confusion += torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)
            for i in (predicted != batch.labels).nonzero().flatten().tolist():
                mistake = Mistake(
                    probability[i].item(),
                    int(batch.samples[i]),
                    int(batch.labels[i]),
                    int(predicted[i]),
                    batch.images[i].clone(),
                )
                (heapq.heappush if len(worst) < NUM_MISTAKES else heapq.heappushpop)(worst, mistake)
    images = int(confusion.sum())
    return Evaluation(
        num_images=images,
        loss=loss / max(images, 1),
        top1=int(confusion.diagonal().sum()) / max(images, 1),
        top5=top5 / max(images, 1) if num_classes > 5 else None,
        confusion=confusion,
        mistakes=sorted(worst, reverse=True),
        bad=bad,
        seconds=time.perf_counter() - start,
    )


def _save_png(pixels: Tensor, path: Path) -> None:
    to_image(pixels).save(path, format="PNG")


def to_image(pixels: Tensor) -> Image.Image:
    """A picture from uint8 [channels, height, width], one or three channels."""
    array = pixels.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; every layer's own mode comes back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
