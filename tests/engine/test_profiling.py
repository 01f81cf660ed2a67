"""What a rank would compute is measured call by call without the others, on a simulated GPU."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from convoy.comm.ranks import Ranks
from convoy.engine.watched import DeviceClock
from convoy.planner.cost.costs import Costs, HostCost, Times
from convoy.planner.cost.link import Links
from convoy.planner.cost.prediction import predict
from convoy.planner.profiling import profile
from convoy.planner.workload import workload_of
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan

CYCLES_PER_S, READING_S = 1.5e9, 4e-6
"""Of the GPU; of the host, to read its clock or to record an event."""


class FakeGpu(TorchDispatchMode):
    """A queue that the host fills, in simulated seconds; every operation is work of it, and done on the CPU, and the
    host takes `jitter` times as long as `host` for it."""

    def __init__(self, host: float, device: float, jitter: Callable[[], float]) -> None:
        super().__init__()
        self.host = self.free = 0.0
        self.seconds, self.jitter = (host, device), jitter

    def read(self) -> float:
        self.host += READING_S
        return self.host

    def launch(self, host: float, device: float) -> None:
        self.host += host
        self.free = max(self.free, self.host) + device

    def event(self, enable_timing: bool = False) -> Any:
        moments: list[float] = []

        def record() -> None:
            self.free = max(self.free, self.read())
            moments.append(self.free)

        def synchronize() -> None:
            self.host = max(self.host, *moments)

        between = lambda end: 1e3 * (end.moments[-1] - moments[-1])  # noqa: E731
        return SimpleNamespace(record=record, synchronize=synchronize, moments=moments, elapsed_time=between)

    def synchronize(self, device: object = None) -> None:
        self.host = max(self.host, self.free)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.launch(0.0, cycles / CYCLES_PER_S))
        properties = SimpleNamespace(clock_rate=CYCLES_PER_S / 1e3)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        clock = DeviceClock(torch.device("cuda"), self.read)
        monkeypatch.setattr("convoy.engine.profiling.DeviceClock", lambda device: clock)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.launch(self.seconds[0] * self.jitter(), self.seconds[1])
        return function(*args, **(kwargs or {}))


def often(draws: Random) -> float:
    """Now and then ten times as long as else; 1 in the mean."""
    return 1 / 1.45 * (10 if draws.random() < 0.05 else 1)


@pytest.mark.parametrize(
    ("device", "jitter"), [(5e-6, lambda draws: 1.0), (19e-6, lambda draws: draws.expovariate(1.0)), (80e-6, often)]
)
def test_an_update_is_predicted_from_what_was_profiled(
    monkeypatch: pytest.MonkeyPatch, device: float, jitter: Callable[[Random], float]
) -> None:
    """A chain bound by its host, by both and by its device takes as long as many passes take each; clocks cost time."""
    draws = Random(3)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(60)]
    net, images = nn.Sequential(*layers), torch.ones(2, 4)
    workload = workload_of(net, images, 2)
    placement = workload.place(Plan(Mesh((), ())))
    ends, gpu = [], FakeGpu(20e-6, device, lambda: jitter(draws))
    gpu.install(monkeypatch)
    with gpu:
        found = profile(workload, placement, Ranks(), True, Links())
        for _ in range(20):
            net.zero_grad()
            outputs = net(images)
            outputs.backward(torch.full_like(outputs, 0.125))
            ends.append(gpu.free)
    costs = Costs(lambda one: found.times.get(one, Times()), on_cpu=False)
    costs = replace(costs, loss=HostCost(found.around.total, host=found.around.host))
    true = (ends[-1] - ends[9]) / 10
    assert predict(placement, costs).total == pytest.approx(true, rel=0.05)
    recorded = predict(placement, replace(costs, recorded=True))
    assert recorded.total == pytest.approx(sum(span.task.seconds for span in recorded.spans))
