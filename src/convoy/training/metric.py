"""Numbers of an evaluation: their names, which of two is better, and how people read them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """A number of an evaluation by its name, and whether more or less of it is better."""

    name: str
    better: Literal["higher", "lower"] = "higher"

    def improves(self, value: float, on: float | None) -> bool:
        """Whether a value is better than another one, or the first. NaN is never better."""
        if value != value or on is None or on != on:
            return value == value
        return value > on if self.better == "higher" else value < on


class MetricOfAll(Metric, ABC):
    """A metric that is a function of the outputs and targets of all samples, in their order."""

    @abstractmethod
    def __call__(self, outputs: "Tensor", targets: "Tensor") -> float:
        """Its value."""


LOSS = Metric("loss", "lower")
_AS_NUMBERS = {"loss", "mse", "mae", "r2"}  # others are shares, 0 to 1


def metric_in_words(name: str, value: float, places: int = 2) -> str:
    """A metric's value for people: `top-1 93.25%`, `mae 0.1234`."""
    words = name.replace("top", "top-").replace("_", " ")
    return f"{words} {value:.4g}" if name in _AS_NUMBERS or not 0 <= value <= 1 else f"{words} {value:.{places}%}"
