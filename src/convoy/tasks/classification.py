"""A network that classifies pictures: its outputs are logits, of which the largest is its answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.data.batch import Batch
from convoy.run import records
from convoy.tasks.metric import LOSS, Metric
from convoy.tasks.task import Drawn, Evaluation, Shown, Task, of_classes, precise


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


_BINS = 15  # of a reliability diagram (Guo et al., 2017)
_UNIT = 2**24  # of a probability, which as a whole number adds up to the same in any order


@dataclass
class ClassificationEvaluation(Evaluation):
    """Its loss is the plain cross-entropy, whatever that of training is; the most confident mistakes are shown."""

    confusion: Tensor  # int64 [classes, classes], true labels in rows
    num_in_top5: int = 0
    # Of each bin of the answers' probabilities: images, right answers, sum of probabilities.
    reliability: Tensor = field(default_factory=lambda: torch.zeros(3, _BINS, dtype=torch.int64))

    summed: ClassVar[tuple[str, ...]] = ("confusion", "num_in_top5", "reliability")
    most_shown: ClassVar[int] = 24
    shows_highest: ClassVar[bool] = True

    def _metrics(self) -> dict[str, float]:
        hits, both = self.confusion.diagonal(), self.confusion.sum(0) + self.confusion.sum(1)
        f1 = 2 * hits.double() / both.clamp(min=1)  # of each class: 2 hits / (samples + answers)
        images = max(self.num_images, 1)
        of_five = {"top5": self.num_in_top5 / images} if len(self.confusion) > 5 else {}  # classes, or fewer
        macro_f1 = float(f1.sum() / both.count_nonzero().clamp(min=1))  # without classes that have neither
        return {"loss": self.loss, "top1": int(hits.sum()) / images, **of_five, "macro_f1": macro_f1}

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

    def _table(self) -> list[list[int]]:
        """The counts; of many classes [true, predicted, count] of those that are not 0, as most are."""
        places, table = self.confusion.nonzero(), self.confusion
        if len(table) > records.LARGEST_TABLE:
            table = torch.cat([places, table[tuple(places.T)][:, None]], 1)
        rows: list[list[int]] = table.tolist()
        return rows

    def _to_show(self, drawn: Drawn) -> dict[str, Any]:
        metrics = self._metrics()
        return {
            "per_class": [],  # they follow from the table
            "confusion": self._table(),
            "top1": metrics["top1"],
            "top5": metrics.get("top5"),
            "mistakes": [
                records.Mistake(
                    sample=wrong.sample, probability=wrong.score, **wrong.facts, **drawn(wrong.sample, wrong.picture)
                )
                for wrong in self.shown
            ],
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
        of_bins = torch.stack([torch.ones_like(pairs), is_right.long(), (certainty * _UNIT).round().long()])
        self.reliability.index_add_(1, places, of_bins)
        wrong = (~is_right).nonzero().flatten()
        if len(self.shown) == self.most_shown:
            wrong = wrong[probability[wrong] >= self.shown[-1].score]
        # Ties go by the sample's number; topk would leave them open: saturated networks are wrong with probability 1 in
        # many samples. Of a batch, no more than so many can be among the worst.
        order = np.lexsort((batch.samples[wrong].numpy(), probability[wrong].numpy()))[-self.most_shown :]
        for i in wrong[order].tolist():
            facts = {"label": int(labels[i]), "predicted": int(predicted[i])}
            self.shown.append(Shown(probability[i].item(), int(batch.samples[i]), batch.images[i].clone(), facts))
        self.shown = self._first(self.shown)
        return loss, len(labels)
