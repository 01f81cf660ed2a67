"""Where the time of an update goes: the input, waiting for other ranks, the optimiser, and all the rest, computing."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from convoy.engine.waits import watching
from convoy.experiments.scaling.visits.parts import COMMUNICATION, INPUT, OPTIMIZER

_PAIRS = 2000


@dataclass(frozen=True)
class Lap:
    """Seconds of an update, and of its parts."""

    seconds: float
    communication: float
    input: float
    optimizer: float


@dataclass
class Stopwatch:
    """Takes the time of updates. What lies inside of something else counts there no more.

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
        """While entered, waits of the engine and steps of optimisers are seen."""
        with ExitStack() as stack:
            stack.enter_context(watching(_Waits(self)))
            for handle in (
                register_optimizer_step_pre_hook(lambda *_: self.enter(OPTIMIZER)),
                register_optimizer_step_post_hook(lambda *_: self.leave()),
            ):
                stack.callback(handle.remove)
            yield

    @contextmanager
    def section(self, part: str) -> Iterator[None]:
        """What is done inside belongs to a part."""
        self.enter(part)
        try:
            yield
        finally:
            self.leave()

    def enter(self, part: str) -> None:
        """A part begins."""
        if not self._stack or self._stack[-1] != part:
            self._close()
        self._stack.append(part)

    def leave(self) -> None:
        """It ends."""
        part = self._stack[-1]
        if len(self._stack) < 2 or self._stack[-2] != part:
            self._close()
        self._stack.pop()

    def lap(self) -> None:
        """An update begins, and the one before it ends."""
        self._close()
        self._laps.append(self._since)
        self._sections.append([])

    def clear(self) -> None:
        """Forget all updates so far."""
        self._laps.clear()
        self._sections.clear()
        self._num_marks = 0

    def laps(self) -> list[Lap]:
        """All updates between two laps."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = []
        for number, (start, end) in enumerate(zip(self._laps, self._laps[1:], strict=False)):
            parts = dict.fromkeys((COMMUNICATION, INPUT, OPTIMIZER), 0.0)
            for part, begun, ended in self._sections[number]:
                parts[part] += self._between(begun, ended)
            found.append(Lap(self._between(start, end), **parts))
        return found

    @property
    def overhead(self) -> float:
        """Seconds that taking the time has added to an update."""
        probe = Stopwatch(self.device)
        probe.lap()
        start = time.perf_counter()
        for _ in range(_PAIRS):
            probe.enter(COMMUNICATION)
            probe.leave()
        each = (time.perf_counter() - start) / (2 * _PAIRS)
        return each * self._num_marks / max(1, len(self._laps) - 1)

    def _close(self) -> None:
        """End what is running, in favour of what is next."""
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


class _Waits:
    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch

    def enter(self) -> None:
        """A wait for other ranks begins."""
        self._stopwatch.enter(COMMUNICATION)

    def leave(self) -> None:
        """It is over."""
        self._stopwatch.leave()
