"""How long work takes on a device, and on the host that issues it.

A CPU is its own host: one clock has both. A GPU works through a queue, so the host's clock sees how long it takes to
issue work, and events in the queue see when the GPU comes to it. Where the host is late the GPU waits for it, and the
time between two events is the host's. To know both, work is done twice: once from an empty queue, by the host's clock,
and once behind something long, by events, so that the GPU finds all of it waiting.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

IN_A_ROW = 20  # how often something short is done between two events
# A GPU is kept busy for so many times as long as the host has taken, within these bounds: the first time, in which
# kernels are loaded and tried out, says nothing about the second.
_MARGIN, _LEAST_S, _MOST_S = 1.5, 1e-3, 0.5
_CYCLES_PER_S = 2e9  # of a GPU that does not say


@dataclass(frozen=True)
class Spent:
    """Seconds that the device works on something, and that the host takes to issue it (0 where that is the device)."""

    device: float
    host: float = 0.0


class DeviceClock:
    """The time on a device: of the host for a CPU, of the stream that computes for a GPU, which is not waited for.
    `host` gives the host's seconds; `is_queue` says that the device works through a queue which the host fills."""

    def __init__(self, device: torch.device, host: Callable[[], float] = time.perf_counter) -> None:
        self.is_queue = device.type == "cuda"
        self._device, self.host = device, host

    def now(self) -> Any:
        if not self.is_queue:
            return self.host()
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one moment to another; a GPU must have come that far."""
        if not self.is_queue:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.is_queue:
            torch.cuda.synchronize(self._device)

    def delay(self, issuing_s: float) -> None:
        """Keep a GPU busy while the host issues what takes it so long, so that the GPU need not wait for it."""
        if self.is_queue:
            rate = 1e3 * getattr(torch.cuda.get_device_properties(self._device), "clock_rate", 0)
            torch.cuda._sleep(int(min(max(_LEAST_S, _MARGIN * issuing_s), _MOST_S) * (rate or _CYCLES_PER_S)))

    def spent(self, run: Callable[[], object], in_a_row: int = IN_A_ROW) -> Spent:
        """The mean time of something short: run once on a CPU, and on a GPU twice `in_a_row` times between events."""
        if not self.is_queue:
            start = self.now()
            run()
            return Spent(self.between(start, self.now()))
        self.wait()
        began = self.host()
        for _ in range(in_a_row):
            run()
        issuing = self.host() - began
        self.wait()
        self.delay(issuing)
        start = self.now()
        for _ in range(in_a_row):
            run()
        return Spent(self.between(start, self.now()) / in_a_row, issuing / in_a_row)
