"""A second model whose weights are an exponential moving average of the trained one's."""

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import swa_utils

from convoy.training.section import Section


class EmaConfig(Section):
    """The `ema` section of a recipe; left out, no average is kept."""

    decay: float = Field(gt=0, lt=1, description="what remains of the average at each weight update, e.g. 0.999")


class AveragedModel(swa_utils.AveragedModel):
    """A copy of a model to evaluate; call `update_parameters(model)` after each weight update.

    average ← d · average + (1 - d) · weights, with d = min(decay, (1 + t) / (10 + t)) after t updates, so that the
    first weights are soon forgotten (the rule of TensorFlow's ExponentialMovingAverage with `num_updates`). Buffers,
    the running statistics of batch norm among them, are those of the trained model.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        assert 0 < decay < 1, decay
        self.decay = decay
        super().__init__(model, multi_avg_fn=self._average, use_buffers=False)

    def _average(
        self,
        averages: tuple[Tensor, ...] | list[Tensor],
        weights: tuple[Tensor, ...] | list[Tensor],
        num_updates: Tensor | int,
    ) -> None:
        decay = effective_decay(self.decay, int(num_updates))
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 1 - decay)


def effective_decay(decay: float, num_updates: int) -> float:
    """The decay of an average that has seen `num_updates` weight updates."""
    return min(decay, (1 + num_updates) / (10 + num_updates))
