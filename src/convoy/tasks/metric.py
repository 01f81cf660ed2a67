"""Numbers of an evaluation: their names, which of two is better, and how people read them; the colors of masks."""

from collections.abc import Callable
from colorsys import hsv_to_rgb
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


@dataclass(frozen=True, kw_only=True)
class MetricOfAll(Metric):
    """A metric that is a function of the outputs and targets of all samples, in their order."""

    of: Callable[["Tensor", "Tensor"], float]


LOSS = Metric("loss", "lower")
_SHARES = {"top1", "top5", "map", "ap", "f1", "macro_f1", "iou", "dice", "precision", "recall", "pixels"}
_SHARES |= {"exact_match", "pixel_accuracy"}  # 0 to 1, of tasks; what others are, nobody knows
_NAMES = {"top1": "top-1", "top5": "top-5", "map": "mAP", "ap": "AP", "f1": "F1", "macro_f1": "macro F1", "iou": "IoU"}
_NAMES |= {"dice": "Dice", "mse": "MSE", "mae": "MAE", "r2": "R²"}


def metric_name(name: str) -> str:
    """As people write it."""
    return _NAMES.get(name, name.replace("_", " "))


def metric_in_words(name: str, value: float, places: int = 2) -> str:
    """A metric's value for people: `top-1 93.25%`, `MAE 0.1234`."""
    return f"{metric_name(name)} {metric_figure(name, value, places)}"


def metric_figure(name: str, value: float, places: int = 2) -> str:
    """The value alone: a share in percent."""
    return f"{value:.{places}%}" if name in _SHARES and 0 <= value <= 1 else f"{value:.4g}"


def palette() -> list[list[int]]:
    """Red, green and blue: black for class 0, others by hues a golden angle apart, grey where nothing is known."""
    hues = [[int(255 * part) for part in hsv_to_rgb(place * 0.618034 % 1, 1, 1)] for place in range(1, 255)]
    return [[0, 0, 0], *hues, [128, 128, 128]]
