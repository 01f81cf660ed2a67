"""A GPU that is not there: a queue that the host fills, and torch.cuda's events on it, in simulated seconds."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from convoy.engine.watched import DeviceClock

CYCLES_PER_S = 1.5e9


class FakeGpu:
    """What torch.cuda would do; `install` puts it in its place.

    Attributes:
        host: seconds on the host.
        free: when the GPU is through with its queue.
        events: how many were recorded.
        reading: seconds that the host takes to read its clock or to record an event.
    """

    def __init__(self) -> None:
        self.host = self.free = self.reading = 0.0
        self.events = 0

    @property
    def clock(self) -> DeviceClock:
        return DeviceClock(torch.device("cuda"), self.read)

    def read(self) -> float:
        self.host += self.reading
        return self.host

    def launch(self, host: float, device: float) -> None:
        """Work that the host takes so long to issue, and the GPU to do."""
        self.host += host
        self.free = max(self.free, self.host) + device

    def event(self, enable_timing: bool = False) -> Any:
        moments: list[float] = []

        def record() -> None:
            self.events += 1
            self.host += self.reading
            self.free = max(self.free, self.host)
            moments.append(self.free)

        def synchronize() -> None:
            self.host = max(self.host, *moments)

        return SimpleNamespace(
            record=record,
            synchronize=synchronize,
            moments=moments,
            elapsed_time=lambda end: 1e3 * (end.moments[-1] - moments[-1]),
        )

    def synchronize(self, device: object = None) -> None:
        self.host = max(self.host, self.free)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(0.0, cycles / CYCLES_PER_S))
        properties = SimpleNamespace(clock_rate=CYCLES_PER_S / 1e3)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


class Launches(TorchDispatchMode):
    """Every operation is work of a fake GPU, and done on the CPU; the host takes `jitter` times as long for it."""

    def __init__(self, gpu: FakeGpu, host: float, device: float, jitter: Callable[[], float] = lambda: 1.0) -> None:
        super().__init__()
        self.gpu, self.costs, self.jitter, self.names = gpu, (host, device), jitter, []  # type: ignore[var-annotated]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        self.gpu.launch(self.costs[0] * self.jitter(), self.costs[1])
        return function(*args, **(kwargs or {}))
