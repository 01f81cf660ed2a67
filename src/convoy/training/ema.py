"""Beside the trained weights an exponential moving average of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pydantic import Field

from convoy.training.config import Section

if TYPE_CHECKING:
    from torch import Tensor, nn


class EmaConfig(Section):
    """The `ema` section of a recipe; left out, no average is kept."""

    decay: float = Field(gt=0, lt=1, description="what remains of the average at each weight update, e.g. 0.999")


class AveragedWeights:
    """Averages of a model's parameters; call `update` after each weight update.

    average ← d · average + (1 - d) · weights, with d = min(decay, (1 + t) / (10 + t)) after t updates, so that the
    first weights are soon forgotten (the rule of TensorFlow's ExponentialMovingAverage with `num_updates`). Buffers,
    the running statistics of batch norm among them, are those of the trained model.

    Attributes:
        averages: by the parameters' names.
        num_updates: updates so far.
    """

    def __init__(self, model: "nn.Module", decay: float) -> None:
        assert 0 < decay < 1, decay
        self.decay = decay
        self.num_updates = 0
        self.averages = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self, model: "nn.Module") -> None:
        """Take the weights of now into the average."""
        import torch  # which a mistake in a recipe is not to wait for

        averages = list(self.averages.values())
        weights: list[Tensor] = [parameter.detach() for parameter in model.parameters()]
        if self.num_updates == 0:
            torch._foreach_copy_(averages, weights)
        else:
            torch._foreach_lerp_(averages, weights, 1 - effective_decay(self.decay, self.num_updates))
        self.num_updates += 1

    @contextmanager
    def in_place(self, model: "nn.Module") -> Iterator[None]:
        """While entered, the model has the averages for its weights."""
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    def load(self, averages: "Mapping[str, Tensor]", num_updates: int) -> None:
        """Go on from averages of before."""
        for name, average in self.averages.items():
            average.copy_(averages[name])
        self.num_updates = num_updates

    def _swap(self, model: "nn.Module") -> None:
        for name, parameter in model.named_parameters():
            parameter.data, self.averages[name] = self.averages[name], parameter.data


def effective_decay(decay: float, num_updates: int) -> float:
    """The decay of an average that has seen `num_updates` weight updates."""
    return min(decay, (1 + num_updates) / (10 + num_updates))
