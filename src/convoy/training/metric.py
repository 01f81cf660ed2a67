"""Numbers of an evaluation: their names, which of two is better, and how people read them."""

from dataclasses import dataclass
from typing import Literal


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


LOSS = Metric("loss", "lower")
_AS_NUMBERS = {"loss", "mse", "mae", "r2"}  # others are shares, 0 to 1
_WORDS = {"top1": "top-1", "top5": "top-5", "map": "mAP", "iou": "IoU", "mse": "MSE", "mae": "MAE", "r2": "R²"}


def in_words(name: str, value: float, places: int = 2) -> str:
    """A metric's value for people: `top-1 93.25%`, `MAE 0.1234`."""
    words = _WORDS.get(name, name.replace("_", " "))
    return f"{words} {value:.4g}" if name in _AS_NUMBERS else f"{words} {value:.{places}%}"
