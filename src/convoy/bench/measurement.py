"""A rank's task, and the clocks of its measurement: time of updates and of their parts, peak of memory."""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from convoy.bench.records import COMMUNICATION, INPUT, OPTIMIZER, Made
from convoy.comm.collectives import watching
from convoy.comm.ranks import Ranks
from convoy.data import Batch
from convoy.engine.allocation import keep_freed_memory
from convoy.training import Recipe, choose_device
from convoy.training.environment import join_ranks

_PAIRS = 2000
_STATUS = Path("/proc/self/status")


@dataclass
class Stopwatch:
    """Takes the time of updates and of their parts; a part within another one is not counted in that as well.

    On a GPU marks are events in its stream, so that what is waited for is what its computing waits for.
    """

    device: torch.device
    _laps: list[Any] = field(default_factory=list)
    _sections: list[list[tuple[str, Any, Any]]] = field(default_factory=list)
    _stack: list[str] = field(default_factory=list)
    _since: Any = None
    _num_marks: int = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Sees waits of the engine and steps of optimizers while it is entered."""
        with ExitStack() as stack:
            stack.enter_context(watching(self))
            for handle in (
                register_optimizer_step_pre_hook(lambda *_: self.enter(OPTIMIZER)),
                register_optimizer_step_post_hook(lambda *_: self.leave()),
            ):
                stack.callback(handle.remove)
            yield

    @contextmanager
    def section(self, part: str) -> Iterator[None]:
        self.enter(part)
        try:
            yield
        finally:
            self.leave()

    def enter(self, part: str = COMMUNICATION) -> None:
        if not self._stack or self._stack[-1] != part:
            self._close()
        self._stack.append(part)

    def leave(self) -> None:
        part = self._stack[-1]
        if len(self._stack) < 2 or self._stack[-2] != part:
            self._close()
        self._stack.pop()

    def lap(self) -> None:
        """End an update, if one was begun, and begin the next."""
        self._close()
        self._laps.append(self._since)
        self._sections.append([])

    def clear(self) -> None:
        self._laps.clear()
        self._sections.clear()
        self._num_marks = 0

    def times(self) -> dict[str, list[float]]:
        """Seconds of all updates between two laps, and of their parts, as `RankTimes` has them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        times = {"seconds": [self._between(start, end) for start, end in pairwise(self._laps)]}
        times |= {part: [0.0] * len(times["seconds"]) for part in (COMMUNICATION, INPUT, OPTIMIZER)}
        for number in range(len(self._laps) - 1):
            for part, begun, ended in self._sections[number]:
                times[part][number] += self._between(begun, ended)
        return times

    @property
    def overhead(self) -> float:
        """Seconds that taking the time has added to an update."""
        probe = Stopwatch(self.device)
        probe.lap()
        start = time.perf_counter()
        for _ in range(_PAIRS):
            probe.enter()
            probe.leave()
        mark_s = (time.perf_counter() - start) / (2 * _PAIRS)
        return mark_s * self._num_marks / max(1, len(self._laps) - 1)

    def _close(self) -> None:
        now = self._now()
        if self._stack and self._sections:
            self._sections[-1].append((self._stack[-1], self._since, now))
        self._since = now

    def _now(self) -> Any:
        self._num_marks += 1
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3 if self.device.type == "cuda" else float(end - start)


@dataclass(frozen=True)
class MeasurementTask:
    """One measurement of a configuration, as its ranks are told."""

    kind: str
    recipe: Recipe  # with the devices and the plan of the configuration
    made: Made | None  # None for the recipe's pictures
    device_type: str  # `cpu`, `cuda`, or one GPU as `cuda:1`
    updates: int  # those that are timed
    warm_up: int  # updates before them

    @property
    def num_devices(self) -> int:
        return self.recipe.parallel.devices or 1


class MemoryPeak:
    """The most bytes that this process has had since it was made, beyond those that it had then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._before = self._now("VmRSS")

    def peak(self) -> int:
        return max(0, self._now("VmHWM") - self._before)

    def _now(self, name: str) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) if name == "VmHWM" else 0
        if not _STATUS.exists():
            return 0
        for line in _STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
        return 0


def join(task: MeasurementTask) -> tuple[Ranks, torch.device]:
    """The ranks, and this one's device; memory that is freed stays with the process, also on one device."""
    if task.num_devices > 1:
        ranks, device = join_ranks(device=task.device_type)
        return ranks, device if task.device_type == "cuda" else torch.device("cpu")
    device = choose_device(task.device_type)
    keep_freed_memory(device)
    return Ranks(), device


def run_updates(
    batches: Generator[Batch, None, None],
    update: Callable[[Batch, int], None],
    stopwatch: Stopwatch,
    warm_up: int,
    barrier: Callable[[], None],
) -> None:
    """Do updates as long as there are batches, and take the time of those after the warm-up."""
    number = 0
    with closing(batches):
        while True:
            if number == warm_up:
                barrier()
                stopwatch.clear()
            stopwatch.lap()
            with stopwatch.section(INPUT):
                batch = next(batches, None)
            if batch is None:
                return
            update(batch, number)
            number += 1
