"""Sums over the updates between two lines of metrics."""

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from convoy.training.ranks.devices import Devices
from convoy.training.step import StepResult

Bad = tuple[int, int, str]
"""Update, sample and reason of a picture that could not be read."""


@dataclass
class Window:
    """Collects losses, right answers and times; reads the device, and asks the other ranks, only for a line or a save.

    The sums are those over all ranks, the same on each, once they were collected.

    Attributes:
        data_wait_s: seconds spent waiting for data, of the rank that waited longest.
        before_s: seconds of work before the run was stopped and resumed.
        paused_s: seconds of evaluations and checkpoints, which do not count as work.
        paused_at: when the pause began that lasts now.
        left_out: updates that were not made, because loss or gradient were not finite.
        ranks_s: seconds of every rank's own work, without its waits for the others; empty where nobody has taken them.
    """

    num_updates: int = 0
    num_images: int = 0
    num_correct: float = 0.0
    loss: float = 0.0
    data_wait_s: float = 0.0
    before_s: float = 0.0
    paused_s: float = 0.0
    paused_at: float | None = None
    left_out: int = 0
    started: float = field(default_factory=time.perf_counter)
    ranks_s: list[float] = field(default_factory=list)
    _own_s: float = 0.0
    _results: list[StepResult] = field(default_factory=list)
    _wait_s: float = 0.0
    _bad: list[Bad] = field(default_factory=list)

    def add(self, result: StepResult, num_images: int) -> None:
        """Count one update of a global batch of so many images, unless it was left out."""
        self._own_s += result.own_s
        if result.bad is not None:
            self.left_out += 1
            return
        self.num_updates += 1
        self.num_images += num_images
        self._results.append(result)

    def waited(self, seconds: float) -> None:
        """This rank waited for data."""
        self._wait_s += seconds

    def add_bad(self, update: int, sample: int, reason: str) -> None:
        """This rank could not read a training picture."""
        self._bad.append((update, sample, reason))

    def pause(self) -> None:
        """Evaluations and checkpoints begin."""
        self.paused_at = time.perf_counter()

    def go_on(self) -> None:
        """Training goes on."""
        if self.paused_at is not None:
            self.paused_s += time.perf_counter() - self.paused_at
            self.paused_at = None

    def averages(self) -> dict[str, float]:
        """Mean loss, share of right answers, images a second (pauses apart), seconds waited for data: as collected."""
        return {
            "loss": self.loss / self.num_updates if self.num_updates else math.nan,
            "top1": self.num_correct / self.num_images if self.num_images else math.nan,
            "images_per_s": self.num_images / max(self.seconds, 1e-9),
            "data_wait_s": self.data_wait_s,
        }

    def pack(self) -> dict[str, float]:
        """The sums as collected, for a checkpoint; `Window(**sums)` goes on with them."""
        return {
            "num_updates": self.num_updates,
            "num_images": self.num_images,
            "num_correct": self.num_correct,
            "loss": self.loss,
            "data_wait_s": self.data_wait_s,
            "before_s": self.seconds,
            "left_out": self.left_out,
        }

    @property
    def seconds(self) -> float:
        """Seconds of work."""
        now = time.perf_counter() if self.paused_at is None else self.paused_at
        return self.before_s + now - self.started - self.paused_s

    def collect(self, devices: Devices) -> list[Bad]:
        """Add up what the ranks have since the last time: one after the other and in double precision, so that neither
        a stop in between nor the number of devices changes anything. All ranks call it.

        Returns:
            The pictures that could not be read, in the order of the updates.
        """
        results, self._results = self._results, []
        losses = iter(_read([loss for result in results for loss in result.losses]))
        mine = [[next(losses) for _ in result.losses] for result in results]
        correct = sum(_read([number for result in results for number in result.correct]))
        bad: list[Bad] = []
        wait_s = 0.0
        everyone = devices.gather((mine, correct, self._wait_s, self._bad, self._own_s + self._wait_s))
        parts = devices.of_parts(everyone)
        for update in zip(*(part[0] for part in parts), strict=True):
            for part in update:
                for value in part:
                    self.loss += value
        before = self.ranks_s or [0.0] * len(everyone)
        self.ranks_s = [own + said[4] for own, said in zip(before, everyone, strict=True)]
        for _, num_correct, rank_wait_s, rank_bad, _ in parts:
            self.num_correct += num_correct
            wait_s = max(wait_s, rank_wait_s)
            bad += rank_bad
        self.data_wait_s += wait_s
        self._wait_s, self._own_s, self._bad = 0.0, 0.0, []
        return sorted(bad, key=lambda entry: entry[0])


def _read(scalars: list[Tensor]) -> list[float]:
    return torch.stack(scalars).tolist() if scalars else []
