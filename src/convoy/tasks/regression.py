"""A network whose outputs are numbers, one or several for a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from convoy.data.batch import Batch
from convoy.tasks.metric import LOSS, Metric
from convoy.tasks.task import Drawn, Evaluation, Task, precise

MOST_POINTS, MOST_OUTPUTS = 1000, 8  # of the plots of predicted over true


@dataclass
class Regression(Task):
    """The loss is the mean squared or absolute error over samples and outputs. Targets are float [samples, outputs]."""

    loss_name: Literal["mse", "mae"] = "mse"

    name: ClassVar[str] = "regression"
    metrics: ClassVar[tuple[Metric, ...]] = (Metric("mae", "lower"), Metric("mse", "lower"), Metric("r2"), LOSS)
    losses: ClassVar[tuple[str, ...]] = ("mse", "mae")
    score_name: ClassVar[str | None] = "mae"
    output_shape: ClassVar[str] = "[samples, outputs]"
    answer_name: ClassVar[str] = "value"

    def _loss_of_head(self, outputs: Tensor, targets: Tensor) -> Tensor:
        values = precise(outputs)
        return (F.mse_loss if self.loss_name == "mse" else F.l1_loss)(values, targets.to(values.dtype))

    def score(self, outputs: Any, targets: Tensor) -> Tensor:
        """Absolute errors, each the mean over the outputs."""
        values = precise(self.heads(outputs)[0].detach())
        return (values - targets.to(values.dtype)).abs().mean(1).sum()

    def example(self, samples: int, image_size: int) -> Tensor:
        return torch.zeros(samples, len(self.classes))

    def evaluation(self) -> "RegressionEvaluation":
        return RegressionEvaluation()

    def answers(self, outputs: Tensor) -> Tensor:
        return outputs


@dataclass
class RegressionEvaluation(Evaluation):
    """Its loss is the mean squared error. What was predicted is kept for sums that no division changes."""

    keeps: ClassVar[bool] = True

    def _add(self, batch: Batch, outputs: Tensor) -> tuple[float, float]:
        error = outputs.cpu().double() - batch.targets.double()
        return float(error.square().mean(1).sum()), len(error)

    def _metrics(self) -> dict[str, float]:
        rows = self.per_class(())
        means = {name: [row[name] for row in rows if row[name] is not None] for name in ("mae", "mse", "r2")}
        return {"loss": self.loss} | {name: float(np.mean(values or np.nan)) for name, values in means.items()}

    def per_class(self, classes: Sequence[str]) -> list[dict[str, Any]]:
        """Mean absolute and squared error of each output, and the share of its variance that is explained (R²)."""
        if (kept := self._all_kept()) is None:
            return []
        predicted, true = (numbers.double() for numbers in kept)
        error, spread = predicted - true, (true - true.mean(0)).square().sum(0)
        return [
            {
                **({"output": classes[number]} if classes else {}),
                "mae": float(error[:, number].abs().mean()),
                "mse": float(error[:, number].square().mean()),
                "r2": float(1 - error[:, number].square().sum() / spread[number]) if spread[number] > 0 else None,
            }
            for number in range(true.shape[1])
        ]

    def _to_show(self, drawn: Drawn) -> dict[str, Any]:
        """True and predicted of each of the first outputs in turn, of at most so many samples, evenly spread."""
        if (kept := self._all_kept()) is None:
            return {}
        predicted, true = (numbers[:, :MOST_OUTPUTS].double() for numbers in kept)
        chosen = torch.linspace(0, len(true) - 1, min(len(true), MOST_POINTS)).long()
        return {"points": torch.stack([true[chosen], predicted[chosen]], 2).flatten(1).tolist()}
