"""A network that says which of some labels a picture has, none or several: its outputs are logits, one for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.data.batch import Batch
from convoy.tasks.metric import LOSS, Metric
from convoy.tasks.task import Evaluation, Task, precise


@dataclass
class MultiLabel(Task):
    """The loss is binary cross-entropy, the mean over samples and labels; targets are 0 or 1 [samples, labels]."""

    threshold: float = 0.5  # probability from which a label counts as there

    name: ClassVar[str] = "multi-label"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("map"), Metric("f1"), Metric("macro_f1"), LOSS)
    losses: ClassVar[tuple[str, ...]] = ("bce",)
    score_name: ClassVar[str | None] = "exact_match"

    def _loss_of_head(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = precise(outputs)
        return F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), self._weights(outputs))

    def score(self, outputs: Any, targets: Tensor) -> Tensor:
        """Samples all of whose labels are right."""
        answers = self.heads(outputs)[0].detach().sigmoid() >= self.threshold
        return (answers == targets.bool()).all(1).count_nonzero()

    def example(self, samples: int, image_size: int) -> Tensor:
        return torch.zeros(samples, len(self.classes))

    def evaluation(self) -> "MultiLabelEvaluation":
        return MultiLabelEvaluation(self.threshold)

    def answers(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()


@dataclass
class MultiLabelEvaluation(Evaluation):
    """Precision over all samples needs all of their probabilities."""

    threshold: float

    keeps: ClassVar[bool] = True

    def _add(self, batch: Batch, outputs: Tensor) -> tuple[float, float]:
        logits = outputs.cpu()
        loss = F.binary_cross_entropy_with_logits(logits, batch.targets.to(logits.dtype), reduction="sum")
        return loss.item() / logits.shape[1], len(logits)

    def _metrics(self) -> dict[str, float]:
        rows = self.per_class(())
        precisions = [row["ap"] for row in rows if row["ap"] is not None]
        f1s = [row["f1"] for row in rows if row["f1"] is not None]
        hits, both = (sum(row[name] for row in rows) for name in ("hits", "both"))
        return {
            "loss": self.loss,
            "map": sum(precisions) / max(len(precisions), 1),
            "f1": 2 * hits / max(both, 1),  # over all samples and labels
            "macro_f1": sum(f1s) / max(len(f1s), 1),  # over labels
        }

    def per_class(self, classes: Sequence[str]) -> list[dict[str, Any]]:
        """Samples with the label, average precision, F1, precision and recall: None where nothing is to divide."""
        if (kept := self._all_kept()) is None:
            return []
        probabilities, targets = kept[0].sigmoid(), kept[1] > 0.5
        answers = probabilities >= self.threshold
        rows = []
        for number, (scores, present, answer) in enumerate(zip(probabilities.T, targets.T, answers.T, strict=True)):
            hits, samples, num_answers = (int(x.count_nonzero()) for x in (present & answer, present, answer))
            both = samples + num_answers
            name = {"class": classes[number], "samples": samples} if classes else {"hits": hits, "both": both}
            row = {"ap": average_precision(scores, present), "f1": 2 * hits / both if both else None}
            row |= {"precision": hits / num_answers if num_answers else None}
            rows.append(name | row | {"recall": hits / samples if samples else None})
        return rows


def average_precision(scores: Tensor, present: Tensor) -> float | None:
    """The sum of precisions at each threshold, each times the recall that it adds; None where no sample has the label.

    It is not interpolated, and samples of equal scores come in at once, so that their order does not matter.
    """
    if not present.any():
        return None
    ordered, order = scores.sort(descending=True)
    hits = present[order].cumsum(0).double()
    last = torch.cat([ordered[1:] != ordered[:-1], torch.ones(1, dtype=torch.bool)])  # of equal scores
    hits, places = hits[last], torch.arange(1, len(order) + 1)[last]
    return float((hits / places * hits.diff(prepend=hits.new_zeros(1))).sum() / hits[-1])
