"""What a GPU and its host take, each for itself, by events on a GPU that is simulated."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from convoy.comm.ranks import Ranks
from convoy.engine.clock import DeviceClock, Spent
from convoy.engine.profiling import OUTSIDE, Profile, Profiler
from convoy.models import create
from convoy.planner import workload_of
from convoy.planner.cost.costs import Costs, HostCost
from convoy.planner.cost.link import Links
from convoy.planner.cost.prediction import predict
from convoy.planner.cost.times import Table, Times
from convoy.planner.profiling import profile
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from gpu_clock import FakeGpu, Launches


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    found = FakeGpu()
    found.install(monkeypatch)
    return found


@pytest.mark.parametrize(("host", "device"), [(20e-6, 5e-6), (20e-6, 500e-6)])
def test_events_see_the_gpu_and_the_hosts_clock_the_host(gpu: FakeGpu, host: float, device: float) -> None:
    gpu.launch(0.0, 0.5)  # what came before
    ran = []
    found = gpu.clock.spent(lambda: (ran.append(1), gpu.launch(host, device)))
    assert (found.device, found.host) == (pytest.approx(device), pytest.approx(host))
    assert len(ran) == 2 * 20 and gpu.events == 2


def test_without_a_delay_events_would_see_a_late_host(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(DeviceClock, "delay", lambda clock, issuing_s: None)
    assert gpu.clock.spent(lambda: gpu.launch(20e-6, 5e-6)).device == pytest.approx(20e-6, rel=0.1)


def test_a_cpu_is_its_own_host() -> None:
    now = iter([1.0, 1.5])
    ran = []
    clock = DeviceClock(torch.device("cpu"), lambda: next(now))
    assert clock.spent(lambda: ran.append(1)) == Spent(0.5)
    assert len(ran) == 1 and not clock.is_queue
    clock.wait()
    clock.delay(1.0)


def profiled(clock: DeviceClock) -> Profile:
    workload = workload_of(create("lenet"), torch.zeros(2, 1, 28, 28), 4)
    profiler = Profiler(workload.place(Plan(Mesh((), ()))), 0, torch.device("cpu"), clock=clock)
    return profiler.run()


@pytest.mark.parametrize(("host", "device"), [(2.0**-13, 2.0**-16), (2.0**-16, 2.0**-13)])
def test_a_profiling_on_a_gpu_has_both(gpu: FakeGpu, host: float, device: float) -> None:
    """Each operation takes as long; so the seconds of every call are as those of its host, whoever is late."""
    with Launches(gpu, host, device) as launched:
        found = profiled(gpu.clock)
    assert launched.names
    for one in found.calls.values():
        assert one.forward / device == pytest.approx(one.host_forward / host)
        assert one.backward / device == pytest.approx(one.host_backward / host)
    layers = [one for name, one in found.calls.items() if name != OUTSIDE]
    assert sum(one.host_forward for one in layers) > 10 * host
    assert found.seconds == pytest.approx(sum(one.forward + one.backward for one in found.calls.values()))


def often(draws: Random) -> float:
    """Now and then ten times as long as else; 1 in the mean."""
    return 1 / 1.45 * (10 if draws.random() < 0.05 else 1)


@pytest.mark.parametrize("jitter", [lambda draws: 1.0, lambda draws: draws.expovariate(1.0), often])
@pytest.mark.parametrize("device", [5e-6, 19e-6, 80e-6])
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
    costs = Costs(Table({one.key: own for one, own in found.times.items()}, lambda one: Times()), on_cpu=False)
    costs = replace(costs, loss=HostCost(found.around.total, host=found.around.host))
    true = (ends[-1] - ends[9]) / 10
    assert predict(placement, costs).total == pytest.approx(true, rel=0.05)
    recorded = predict(placement, replace(costs, recorded=True))
    assert recorded.total == pytest.approx(sum(span.task.seconds for span in recorded.spans))


def test_a_first_pass_in_which_kernels_are_loaded_does_not_count(gpu: FakeGpu) -> None:
    class First(Launches):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.costs = (1.0 if gpu.events == 0 else 2.0**-13), 2.0**-16
            return super().__torch_dispatch__(function, types, args, kwargs)

    with First(gpu, 0.0, 0.0):
        found = profiled(gpu.clock)
    assert sum(one.host_forward + one.host_backward for one in found.calls.values()) < 0.1


def test_every_pass_casts_its_weights(gpu: FakeGpu) -> None:
    """As every update in training does: autocast keeps them for one pass."""
    workload = workload_of(create("lenet"), torch.zeros(2, 1, 28, 28), 4)
    profiler = Profiler(workload.place(Plan(Mesh((), ()))), 0, torch.device("cpu"))
    counts = []
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            with Launches(gpu, 0.0, 0.0) as launched:
                profiler.try_out()
            counts.append(launched.names.count("aten._to_copy.default"))
    assert counts[0] == counts[1] > 0


def test_a_profiling_on_a_cpu_knows_no_host() -> None:
    found = profiled(DeviceClock(torch.device("cpu")))
    assert all(one.forward > 0 for name, one in found.calls.items() if name.startswith("conv"))
    assert not any(one.host_forward or one.host_backward for one in found.calls.values())
