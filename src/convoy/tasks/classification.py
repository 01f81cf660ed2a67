"""A network that classifies pictures: its outputs are logits, of which the largest is its answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.data import Batch
from convoy.run import records
from convoy.tasks.metric import LOSS, Metric
from convoy.tasks.task import Evaluation, Task, of_classes, precise


@dataclass
class Classification(Task):
    """Each sample is of one class; the loss is cross-entropy, or binary cross-entropy (`bce`), the mean over samples
    and classes.

    Label smoothing is that of Szegedy et al., 2016: the target is (1 - ε) for the label plus ε / classes for every
    class. Before that, and with `bce` alone, classes with more than `target_threshold` become 1, and others 0: both of
    a mixed picture are there (Wightman et al., 2021, section 3). With class weights the sum of weighted terms is
    divided by the number of samples. Torch divides it by the sum of their weights, so that what a sample counts hangs
    on the others of its microbatch.
    """

    label_smoothing: float = 0.0
    loss_name: Literal["cross-entropy", "bce"] = "cross-entropy"
    target_threshold: float | None = None

    name: ClassVar[str] = "classification"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("top1"), Metric("top5"), Metric("macro_f1"), LOSS)
    losses: ClassVar[tuple[str, ...]] = ("cross-entropy", "bce")
    score_name: ClassVar[str | None] = "top1"

    def _loss_of_head(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of logits [samples, classes] and labels [samples], or class probabilities [samples, classes]."""
        weights = self._weights(outputs)
        if self.loss_name == "cross-entropy":
            smoothing = self.label_smoothing
            if weights is None:
                return F.cross_entropy(outputs, targets, label_smoothing=smoothing)
            total = F.cross_entropy(precise(outputs), targets, weights, reduction="sum", label_smoothing=smoothing)
            return total / len(outputs)
        logits, classes = precise(outputs), outputs.shape[1]
        present = (F.one_hot(targets, classes) if targets.dim() == 1 else targets).to(logits.dtype)
        if self.target_threshold is not None:
            present = (present > self.target_threshold).to(logits.dtype)
        smooth = present * (1 - self.label_smoothing) + self.label_smoothing / classes
        return F.binary_cross_entropy_with_logits(logits, smooth, weights)

    def score(self, outputs: Any, targets: Tensor) -> Tensor:
        """Samples whose largest logit is their label, or their most probable class: an integer scalar."""
        labels = targets if targets.dim() == 1 else targets.argmax(1)
        return (self.heads(outputs)[0].detach().argmax(1) == labels).count_nonzero()

    def answers(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(1)

    def evaluation(self) -> "ClassificationEvaluation":
        return ClassificationEvaluation(torch.zeros(len(self.classes), len(self.classes), dtype=torch.int64))


NUM_MISTAKES = 24
_BINS = 15  # of a reliability diagram (Guo et al., 2017)
_UNIT = 2**24  # of a probability, which as a whole number adds up to the same in any order


@dataclass(order=True)
class WrongAnswer:
    """A sample that the network got wrong; `picture` is what the network saw, uint8 [channels, height, width]."""

    probability: float
    sample: int
    label: int = field(compare=False)
    predicted: int = field(compare=False)
    picture: Tensor = field(compare=False, repr=False)


@dataclass
class ClassificationEvaluation(Evaluation):
    """Its loss is the plain cross-entropy, whatever that of training is."""

    confusion: Tensor  # int64 [classes, classes], true labels in rows
    num_in_top5: int = 0
    mistakes: list[WrongAnswer] = field(default_factory=list)  # the most confident ones, these first
    # Of each bin of the answers' probabilities: images, right answers, sum of probabilities.
    reliability: Tensor = field(default_factory=lambda: torch.zeros(3, _BINS, dtype=torch.int64))

    task: ClassVar[str] = "classification"

    @property
    def top1(self) -> float:
        """Share of samples, 0 to 1."""
        return int(self.confusion.diagonal().sum()) / max(self.num_images, 1)

    @property
    def top5(self) -> float | None:
        """The same; None for five classes or fewer."""
        return self.num_in_top5 / max(self.num_images, 1) if len(self.confusion) > 5 else None

    @property
    def macro_f1(self) -> float:
        """The mean over the classes of 2 hits / (samples + answers), without those that have neither."""
        both = self.confusion.sum(0) + self.confusion.sum(1)
        f1 = 2 * self.confusion.diagonal().double() / both.clamp(min=1)
        return float(f1.sum() / both.count_nonzero().clamp(min=1))

    def _metrics(self) -> dict[str, float]:
        of_five = {} if self.top5 is None else {"top5": self.top5}
        return {"loss": self.loss, "top1": self.top1, **of_five, "macro_f1": self.macro_f1}

    def per_class(self, classes: Sequence[str]) -> list[dict[str, Any]]:
        """Name, samples, precision and recall of each class: 0 to 1, None where there is nothing to divide."""
        return [
            {"class": name, "samples": samples, "precision": hits / answers if answers else None}
            | {"recall": hits / samples if samples else None}
            for name, (hits, samples, answers) in zip(classes, of_classes(self.confusion), strict=True)
        ]

    def calibration(self) -> list[records.CalibrationBin]:
        """The bins of the reliability diagram that have images."""
        bins = (row for row in self.reliability.T.tolist() if row[0])
        return [
            records.CalibrationBin(images=images, accuracy=hits / images, confidence=total / images / _UNIT)
            for images, hits, total in bins
        ]

    def _to_show(self) -> dict[str, Any]:
        def record(wrong: WrongAnswer) -> Any:
            row = {key: getattr(wrong, key) for key in ("sample", "label", "predicted", "probability")}
            return partial(records.Mistake, **row)

        return {
            "per_class": [],  # they follow from the table
            "confusion": self.confusion.tolist(),
            "top1": self.top1,
            "top5": self.top5,
            "mistakes": [(wrong.sample, wrong.picture, record(wrong)) for wrong in self.mistakes],
            "calibration": self.calibration(),
        }

    def _add(self, batch: Batch, outputs: Tensor) -> tuple[float, float]:
        num_classes, logits, labels = len(self.confusion), outputs.cpu(), batch.targets
        loss = F.cross_entropy(logits, labels, reduction="sum").item()
        if num_classes > 5:
            self.num_in_top5 += int((logits.topk(5).indices == labels[:, None]).sum())
        probability, predicted = logits.softmax(1).max(1)
        pairs = labels * num_classes + predicted
        self.confusion.view(-1).index_add_(0, pairs, torch.ones_like(pairs))
        is_right = predicted == labels
        certainty = probability.nan_to_num()
        places = (certainty * _BINS).long().clamp(max=_BINS - 1)
        facts = torch.stack([torch.ones_like(pairs), is_right.long(), (certainty * _UNIT).round().long()])
        self.reliability.index_add_(1, places, facts)
        wrong = (~is_right).nonzero().flatten()
        if len(self.mistakes) == NUM_MISTAKES:
            wrong = wrong[probability[wrong] >= self.mistakes[-1].probability]
        # Ties go by the sample's number; topk would leave them open: saturated networks are wrong with probability 1 in
        # many samples. Of a batch, no more than so many can be among the worst.
        order = np.lexsort((batch.samples[wrong].numpy(), probability[wrong].numpy()))[-NUM_MISTAKES:]
        mistakes = [
            WrongAnswer(
                probability[i].item(),
                int(batch.samples[i]),
                int(labels[i]),
                int(predicted[i]),
                batch.images[i].clone(),
            )
            for i in wrong[order].tolist()
        ]
        self.mistakes = sorted(self.mistakes + mistakes, reverse=True)[:NUM_MISTAKES]
        return loss, len(labels)

    def _merged(self, parts: Sequence["ClassificationEvaluation"]) -> dict[str, Any]:
        return {
            "confusion": torch.stack([part.confusion for part in parts]).sum(0),
            "num_in_top5": sum(part.num_in_top5 for part in parts),
            "reliability": torch.stack([part.reliability for part in parts]).sum(0),
            "mistakes": sorted((wrong for part in parts for wrong in part.mistakes), reverse=True)[:NUM_MISTAKES],
        }
