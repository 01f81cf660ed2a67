"""A network that says of every pixel of a picture which class it is of: its outputs are logits, one for each class and
pixel. Pixels of the value 255 in a mask are not labelled: they count nowhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.data.batch import Batch
from convoy.data.masks import UNLABELLED
from convoy.errors import ConvoyError
from convoy.run import records
from convoy.tasks.metric import LOSS, Metric, palette
from convoy.tasks.task import Drawn, Evaluation, Shown, Task, of_classes, precise


@dataclass
class Segmentation(Task):
    """The loss is cross-entropy, the mean over labelled pixels; or Dice's, 1 - 2 Σpg / (Σp + Σg) of probabilities p and
    the mask g, the mean over the classes in a picture (Milletari et al., 2016, section 3), in which a picture counts by
    its labelled pixels; or the sum of both. With class weights a pixel counts by that of its class.
    """

    loss_name: Literal["cross-entropy", "dice", "cross-entropy+dice"] = "cross-entropy"

    name: ClassVar[str] = "segmentation"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("iou"), Metric("dice"), Metric("pixel_accuracy"), LOSS)
    losses: ClassVar[tuple[str, ...]] = ("cross-entropy", "dice", "cross-entropy+dice")
    num_dims: ClassVar[int] = 4
    output_shape: ClassVar[str] = "[samples, classes, height, width]"
    answer_name: ClassVar[str] = "share"

    def _loss_of_head(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits, targets = precise(outputs), targets.long()
        pixels = self._pixel_weights(targets).to(logits.dtype)
        of_pictures = pixels.sum((1, 2))
        classes = targets.where(targets != UNLABELLED, 0)
        total = logits.new_zeros(())
        if self.loss_name != "dice":
            total = total + (F.cross_entropy(logits, classes, reduction="none") * pixels).sum()
        if "dice" in self.loss_name:
            labelled = (targets != UNLABELLED)[:, None]
            mask = F.one_hot(classes, logits.shape[1]).permute(0, 3, 1, 2) * labelled
            probabilities = logits.softmax(1) * labelled
            common, both = (x.sum((2, 3)) for x in (probabilities * mask, probabilities + mask))
            there = mask.sum((2, 3)) > 0
            scores = torch.where(there, 2 * common / both.clamp(min=1e-12), 0).sum(1) / there.sum(1).clamp(min=1)
            total = total + ((1 - scores) * of_pictures).sum()
        return total / of_pictures.sum().clamp(min=1e-12)

    def _pixel_weights(self, targets: Tensor) -> Tensor:
        labelled = targets != UNLABELLED
        if self.class_weights is None:
            return labelled.to(torch.float32)
        return self.class_weights.to(targets.device)[targets.where(labelled, 0)] * labelled

    def count(self, targets: Tensor) -> Tensor:
        if self.class_weights is None:
            return (targets != UNLABELLED).sum()
        return torch.stack([(targets == number).sum() for number in range(len(self.classes))])

    def example(self, samples: int, image_size: int) -> Tensor:
        return torch.zeros(samples, image_size, image_size, dtype=torch.uint8)

    def check_outputs(self, outputs: Any, image_shape: tuple[int, int, int], network: str) -> None:
        super().check_outputs(outputs, image_shape, network)
        height, width = self.heads(outputs)[0].shape[2:]
        if (height, width) != image_shape[1:]:
            raise ConvoyError(
                f"{network} gives {height}×{width} pixels for pictures of {image_shape[1]}×{image_shape[2]}, but "
                "segmentation needs as many: choose another image size or network, such as unet"
            )

    def evaluation(self) -> "SegmentationEvaluation":
        return SegmentationEvaluation(torch.zeros(len(self.classes), len(self.classes), dtype=torch.int64))

    def answers(self, outputs: Tensor) -> Tensor:
        """The share of the pixels of each class."""
        return F.one_hot(outputs.argmax(1), outputs.shape[1]).float().mean((1, 2))


@dataclass
class SegmentationEvaluation(Evaluation):
    """Counts of pixels over the whole split. Its loss is the plain cross-entropy, whatever that of training is. The
    pictures are shown whose labelled pixels are right least often, with mask and answer, uint8 [height, width].
    """

    confusion: Tensor  # int64 [classes, classes], true classes in rows

    summed: ClassVar[tuple[str, ...]] = ("confusion",)
    most_shown: ClassVar[int] = 12

    def _add(self, batch: Batch, outputs: Tensor) -> tuple[float, float]:
        num, targets = len(self.confusion), batch.targets.to(outputs.device).long()
        losses = F.cross_entropy(outputs, targets, ignore_index=UNLABELLED, reduction="none")
        labelled, answers = targets != UNLABELLED, outputs.argmax(1)
        pairs = (targets * num + answers)[labelled]
        self.confusion += pairs.bincount(minlength=num * num).view(num, num).cpu()
        pixels, right = labelled.sum((1, 2)), (answers == targets).sum((1, 2))
        accuracies = (right / pixels).nan_to_num(1.0).tolist()
        poor = sorted(zip(accuracies, batch.samples.tolist(), range(len(batch)), strict=True))[: self.most_shown]
        masks = answers.to("cpu", torch.uint8)
        for share, sample, i in poor:
            facts = {"mask": batch.targets[i].clone(), "answer": masks[i].clone()}
            self.shown.append(Shown(share, sample, batch.images[i].clone(), facts))
        self.shown = self._first(self.shown)
        return float(losses.double().sum()), float(pixels.sum())

    def _metrics(self) -> dict[str, float]:
        rows = self.per_class(range(len(self.confusion)))
        means = {name: [row[name] for row in rows if row[name] is not None] for name in ("iou", "dice")}
        right, pixels = int(self.confusion.diagonal().sum()), int(self.confusion.sum())
        of_classes = {name: sum(values) / max(len(values), 1) for name, values in means.items()}
        return {"loss": self.loss, **of_classes, "pixel_accuracy": right / max(pixels, 1)}

    def per_class(self, classes: Sequence[Any]) -> list[dict[str, Any]]:
        """The share of a class of all pixels, intersection over union and Dice; None for one that is nowhere."""
        total = max(int(self.confusion.sum()), 1)
        return [
            {
                "class": name,
                "pixels": pixels / total,
                "iou": hits / (pixels + answers - hits) if pixels + answers else None,
                "dice": 2 * hits / (pixels + answers) if pixels + answers else None,
            }
            for name, (hits, pixels, answers) in zip(classes, of_classes(self.confusion), strict=True)
        ]

    def _to_show(self, drawn: Drawn) -> dict[str, Any]:
        """The picture, its mask and the answer, side by side."""
        pictures = []
        for poor in self.shown:
            strip = torch.cat([poor.picture.expand(3, -1, -1), *map(in_color, poor.facts.values())], 2)
            pictures.append(records.ShownPicture(score=poor.score, **drawn(poor.sample, strip)))
        return {"pictures": pictures}


def in_color(mask: Tensor) -> Tensor:
    """A mask for people."""
    return torch.tensor(palette(), dtype=torch.uint8)[mask.long()].permute(2, 0, 1)
