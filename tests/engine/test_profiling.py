"""What a rank would compute is measured call by call without the others, on a simulated GPU."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import nn

from convoy.comm.ranks import Ranks
from convoy.planner.cost.costs import Costs, HostCost, Times
from convoy.planner.cost.link import Links
from convoy.planner.cost.prediction import predict
from convoy.planner.profiling import profile
from convoy.planner.workload import workload_of
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from gpu_clock import FakeGpu, Launches


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    found = FakeGpu()
    found.install(monkeypatch)
    return found


def often(draws: Random) -> float:
    """Now and then ten times as long as else; 1 in the mean."""
    return 1 / 1.45 * (10 if draws.random() < 0.05 else 1)


@pytest.mark.parametrize(
    ("device", "jitter"), [(5e-6, lambda draws: 1.0), (19e-6, lambda draws: draws.expovariate(1.0)), (80e-6, often)]
)
def test_an_update_is_predicted_from_what_was_profiled(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, device: float, jitter: Callable[[Random], float]
) -> None:
    """A chain bound by its host, by both and by its device takes as long as many passes take each; clocks cost time."""
    monkeypatch.setattr("convoy.engine.profiling.DeviceClock", lambda device: gpu.clock)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(60)]
    net, images, draws, gpu.reading = nn.Sequential(*layers), torch.ones(2, 4), Random(3), 4e-6
    workload = workload_of(net, images, 2)
    placement = workload.place(Plan(Mesh((), ())))
    ends = []
    with Launches(gpu, 20e-6, device, lambda: jitter(draws)):
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
