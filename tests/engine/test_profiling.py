"""What a rank would compute is measured call by call without the others: rehearsed, on a CPU or on a simulated GPU."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import nn

from convoy.comm.ranks import Ranks
from convoy.engine.profiling import OUTSIDE, Profiler
from convoy.engine.watched import DeviceClock
from convoy.planner.cost.costs import Costs, HostCost, Times
from convoy.planner.cost.link import Links
from convoy.planner.cost.prediction import predict
from convoy.planner.profiling import profile
from convoy.planner.workload import Workload, workload_of
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from gpu_clock import FakeGpu, Launches
from small_nets import SMALL_NETS

CPU = torch.device("cpu")
IMAGES = torch.zeros(8, 3, 16, 16)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    found = FakeGpu()
    found.install(monkeypatch)
    return found


def test_events_see_the_gpu_and_the_hosts_clock_the_host(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in (5e-6, 500e-6):
        gpu.launch(0.0, 0.5)  # what came before
        ran: list[int] = []
        found = gpu.clock.spent(lambda ran=ran, device=device: (ran.append(1), gpu.launch(20e-6, device)))
        assert (found.device, found.host) == (pytest.approx(device), pytest.approx(20e-6))
        assert len(ran) == 2 * 20
    monkeypatch.setattr(DeviceClock, "delay", lambda clock, issuing_s: None)
    late = gpu.clock.spent(lambda: gpu.launch(20e-6, 5e-6)).device
    assert late == pytest.approx(20e-6, rel=0.1), "without a delay events would see a late host"


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


def workload(name: str, **options: object) -> Workload:
    torch.manual_seed(0)
    images = torch.zeros(8, 3, 32, 32) if name == "root-mean-square" else IMAGES  # it normalizes whole pictures
    return workload_of(SMALL_NETS[name](), images, 8, **options)


def test_every_call_takes_some_time_on_every_rank_in_every_mode_of_batch_norm() -> None:
    for plan, names in {"filter=2": sorted(SMALL_NETS), "sample=2,height=2": ["dense", "dropping"]}.items():
        for placement in (workload(name).place(Plan.parse(plan)) for name in names):
            for rank in range(placement.mesh.num_devices):
                times = Profiler(placement, rank, CPU).run(enough=1).calls
                assert set(times) == {OUTSIDE, *(placed.call.name for placed in placement.calls)}
                heavy = [placed.call.name for placed in placement.calls if placed.call.op in ("conv", "linear")]
                assert all(times[call].forward > 0 and times[call].backward > 0 for call in heavy)
    for batch_norm in ("sync", "microbatch"):
        found = workload("shuffle", batch_norm=batch_norm, microbatch=2)
        options = {"channels_last": True, "batch_norm": batch_norm, "microbatches": found.sizes}
        profiler = Profiler(found.place(Plan.parse("sample=2")), 1, CPU, **options)
        first, second = (profiler.run(enough=1).calls for _ in range(2))
        assert set(first) == set(second)


def test_what_looks_at_a_pass_keeps_nothing_of_it() -> None:
    """Graphs of autograd that a hook goes around in are never collected."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 6 * 6, 4), nn.Softmax(1))
    placement = workload_of(net, torch.ones(2, 1, 8, 8), 2).place(Plan(Mesh((), ())))
    profiler = Profiler(placement, 0, CPU)
    profiler.run(enough=1)
    weights = [weakref.ref(tensor) for tensor in profiler._tensors]
    assert len(weights) > 4
    del profiler
    gc.collect()
    assert all(weight() is None for weight in weights)
