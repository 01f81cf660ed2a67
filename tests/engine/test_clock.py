"""What a GPU and its host take, each for itself, by events on a GPU that is simulated."""

from typing import Any

import pytest
import torch

from convoy.engine.clock import DeviceClock, Spent
from convoy.engine.profiling import OUTSIDE, Profile, Profiler
from convoy.models import create
from convoy.planner import workload_of
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


def test_a_first_pass_in_which_kernels_are_loaded_does_not_count(gpu: FakeGpu) -> None:
    class First(Launches):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.costs = (1.0 if gpu.events == 0 else 2.0**-13), 2.0**-16
            return super().__torch_dispatch__(function, types, args, kwargs)

    with First(gpu, 0.0, 0.0):
        found = profiled(gpu.clock)
    assert sum(one.host_forward + one.host_backward for one in found.calls.values()) < 0.1


def test_a_profiling_on_a_cpu_knows_no_host() -> None:
    found = profiled(DeviceClock(torch.device("cpu")))
    assert all(one.forward > 0 for name, one in found.calls.items() if name.startswith("conv"))
    assert not any(one.host_forward or one.host_backward for one in found.calls.values())
