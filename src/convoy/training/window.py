"""Sums over the updates between two lines of metrics."""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from convoy.training.step import StepResult


@dataclass
class Window:
    """Collects losses, right answers and times; reads the device only when a line is written.

    Attributes:
        before_s: seconds of work before the run was stopped and resumed.
        paused_s: seconds of evaluations and checkpoints, which do not count as work.
        paused_at: when the pause began that lasts now.
    """

    num_updates: int = 0
    num_images: int = 0
    num_correct: float = 0.0
    loss: float = 0.0
    data_wait_s: float = 0.0
    before_s: float = 0.0
    paused_s: float = 0.0
    paused_at: float | None = None
    started: float = field(default_factory=time.perf_counter)
    _losses: list[Tensor] = field(default_factory=list)
    _correct: list[Tensor] = field(default_factory=list)

    def add(self, result: StepResult, num_images: int) -> None:
        """Count one update."""
        self.num_updates += 1
        self.num_images += num_images
        self._losses += result.losses
        self._correct += result.correct

    def pause(self) -> None:
        """Evaluations and checkpoints begin."""
        self.paused_at = time.perf_counter()

    def go_on(self) -> None:
        """Training goes on."""
        if self.paused_at is not None:
            self.paused_s += time.perf_counter() - self.paused_at
            self.paused_at = None

    def averages(self) -> dict[str, float]:
        """Mean loss, share of right answers, images a second (pauses apart) and seconds waited for data."""
        self._collect()
        return {
            "loss": self.loss / self.num_updates,
            "top1": self.num_correct / self.num_images,
            "images_per_s": self.num_images / max(self.seconds, 1e-9),
            "data_wait_s": self.data_wait_s,
        }

    def pack(self) -> dict[str, float]:
        """The sums, for a checkpoint; `Window(**sums)` goes on with them."""
        self._collect()
        return {
            "num_updates": self.num_updates,
            "num_images": self.num_images,
            "num_correct": self.num_correct,
            "loss": self.loss,
            "data_wait_s": self.data_wait_s,
            "before_s": self.seconds,
        }

    @property
    def seconds(self) -> float:
        """Seconds of work."""
        now = time.perf_counter() if self.paused_at is None else self.paused_at
        return self.before_s + now - self.started - self.paused_s

    def _collect(self) -> None:
        """Read the device: one after the other and in double precision, so that a stop in between changes nothing."""
        if self._losses:
            for value in torch.stack(self._losses).tolist():
                self.loss += value
            self.num_correct += int(torch.stack(self._correct).sum())
            self._losses, self._correct = [], []
