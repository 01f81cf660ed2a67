"""Writes the course of a run: `metrics.jsonl` for programs, TensorBoard events for people."""

import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tensorboardX import SummaryWriter

from convoy.training.files import to_json


class MetricsWriter:
    """Appends lines to the metrics of a run, each at once on disk's side of the process."""

    def __init__(self, metrics: Path, tensorboard: Path, first_step: int = 0) -> None:
        self._file = metrics.open("a", encoding="utf-8", buffering=1)
        self._board = SummaryWriter(str(tensorboard), purge_step=first_step + 1)

    @staticmethod
    def silent() -> "MetricsWriter":
        """One that writes nothing: of ranks other than 0."""
        return _Silent()

    def write(self, split: str, step: int, epoch: float, time_s: float, **values: float | int | None) -> dict[str, Any]:
        """Write one line: split, updates done, epochs done, seconds since the start, and the values measured."""
        line = {"split": split, "step": step, "epoch": round(epoch, 6), "time_s": round(time_s, 4), **values}
        self._file.write(to_json(line) + "\n")
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                self._board.add_scalar(f"{split}/{name}", value, step)
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._board.close()


class _Silent(MetricsWriter):
    def __init__(self) -> None:
        pass

    def write(self, split: str, step: int, epoch: float, time_s: float, **values: float | int | None) -> dict[str, Any]:
        return {}

    def __exit__(self, *_: object) -> None:
        pass
