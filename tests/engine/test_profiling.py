"""What a rank would compute is measured call by call without the others: rehearsed, on a CPU or on a simulated GPU."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convoy.comm.ranks import Ranks
from convoy.engine.coupling import probe
from convoy.engine.profiling import OUTSIDE, Profile, Profiler, middle_half, steady, tiled
from convoy.engine.watched import DeviceClock, Spent, WatchedUpdate
from convoy.models import create
from convoy.planner import Workload, workload_of
from convoy.planner.cost.costs import Costs, HostCost, Times
from convoy.planner.cost.link import Links
from convoy.planner.cost.prediction import predict
from convoy.planner.link_probe import measured_links
from convoy.planner.profiling import profile
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from gpu_clock import FakeGpu, Launches
from ranks import run_ranks
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


def test_a_cpu_is_its_own_host() -> None:
    now, ran = iter([1.0, 1.5]), list[int]()
    clock = DeviceClock(CPU, lambda: next(now))
    assert clock.spent(lambda: ran.append(1)) == Spent(0.5)
    assert len(ran) == 1 and not clock.is_queue
    found = profiled(DeviceClock(CPU))
    assert all(one.forward > 0 for name, one in found.calls.items() if name.startswith("conv"))
    assert not any(one.host_forward or one.host_backward for one in found.calls.values())


def profiled(clock: DeviceClock) -> Profile:
    workload = workload_of(create("lenet"), torch.zeros(2, 1, 28, 28), 4)
    profiler = Profiler(workload.place(Plan(Mesh((), ()))), 0, CPU, clock=clock)
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
    profiler = Profiler(workload.place(Plan(Mesh((), ()))), 0, CPU)
    counts = []
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            with Launches(gpu, 0.0, 0.0) as launched:
                profiler.try_out()
            counts.append(launched.names.count("aten._to_copy.default"))
    assert counts[0] == counts[1] > 0


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
    for batch_norm in ("sync", "microbatch", "local"):
        found = workload("shuffle", batch_norm=batch_norm, microbatch=2)
        options = {"channels_last": True, "batch_norm": batch_norm, "microbatches": found.sizes}
        profiler = Profiler(found.place(Plan.parse("sample=2")), 1, CPU, **options)
        first, second = (profiler.run(enough=1).calls for _ in range(2))
        assert set(first) == set(second)


def test_images_are_arranged_as_in_training() -> None:
    placement = workload("depthwise").place(Plan.parse("filter=2"))
    profiler = Profiler(placement, 0, CPU, channels_last=True)
    images = [t for t in profiler._tensors if t.dim() == 4 and not t.requires_grad]
    assert len(images) == 1
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in images)


def test_what_is_at_hand_is_used() -> None:
    torch.manual_seed(0)
    model = SMALL_NETS["depthwise"]()
    found = workload_of(model, torch.randn(1, 3, 16, 16), 8)
    placement = found.place(Plan.parse("filter=2"))
    profiler = Profiler(placement, 1, CPU, contents=found.contents)
    parts = dict(zip(profiler._program.sources, profiler._tensors, strict=True))
    weights = {name: tensor for name, tensor in parts.items() if tensor.dim() == 4 and tensor.requires_grad}
    assert weights
    whole = dict(model.named_parameters())
    for name, tensor in weights.items():
        assert torch.equal(tensor, whole[name][-len(tensor) :])  # the second half of the filters
        tensor.data.zero_()  # and never the network's own
        assert whole[name].any()
    images = parts[found.graph.inputs[0]]
    assert torch.equal(images[0], images[-1])
    assert len(images) == 8


def test_a_stand_in_resembles_what_comes_in() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert tiled(x, (2, 3)) is x
    assert tiled(x, (4, 2)).tolist() == [[0, 1], [3, 4], [0, 1], [3, 4]]
    assert tiled(x[:0], (2, 3)).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_enough_measurements_near_the_fastest_count_from_the_first_of_these_on() -> None:
    for seconds, counting, used in [
        ((5.0, 1.0, 1.01, 1.02, 9.0), [1.0, 1.01, 1.02], 4),  # the first found cold memory
        ((5.0, 2.0, 1.0, 1.5, 1.02, 1.01, 9.0), [1.0, 1.5, 1.02, 1.01], 6),  # three near 2 would not have been enough
        ((1.0, 1.0, 1.0, 9.0), [1.0, 1.0, 1.0], 3),
        ((8.0, 4.0, 2.0, 1.0), [1.0], 4),  # never steady: what was best
    ]:
        values = iter(seconds)
        assert steady(values.__next__, lambda value: value, most=min(10, used)) == counting
        assert len(seconds) - len(list(values)) == used


def test_measuring_ends_when_all_agree_and_early_where_it_takes_long() -> None:
    answers = iter((False, False, True))
    assert len(steady(lambda: 1.0, lambda value: value, lambda done: next(answers), enough=1)) == 3
    said: list[bool] = []
    placement = workload("depthwise").place(Plan.parse("serial"))
    Profiler(placement, 0, CPU).run(lambda done: said.append(done) or len(said) == 5, enough=1)
    assert len(said) == 5 and said[0]
    for patience_s, settled, best in [
        (0.0, lambda: True, [4.0]),  # two are enough
        (60.0, lambda: True, [1.0]),
        (0.0, iter((False, True)).__next__, [2.0]),  # but not while memory grows
    ]:
        values = iter((8.0, 4.0, 2.0, 1.0))
        times = steady(values.__next__, lambda value: value, patience_s=patience_s, most=4, settled=settled)
        assert times == best
    assert middle_half([3.0, 1.0, 2.0], float) == [1.0, 2.0, 3.0]  # of three nothing is left out
    assert middle_half([9.0, 1.0, 3.0, 2.0], float) == [2.0, 3.0]
    assert middle_half([5.0, 9.0, 1.0, 8.0, 4.0, 2.0, 7.0, 3.0], float) == [3.0, 4.0, 5.0, 7.0]


def links() -> None:
    mesh = Mesh(("node", "gpu"), (2, 2))
    measured, _ = measured_links([mesh], 1024, CPU)
    found = {axes: measured.of(mesh, axes) for axes in ((0,), (1,), (0, 1))}
    assert all(one.all_reduce.points[-1][0] == 4096 <= one.exchange.points[-1][0] for one in found.values())
    assert not found[0, 1].overlap  # shared memory: nothing runs beside


def test_links_of_all_groups_of_a_mesh() -> None:
    run_ranks(links, 4)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 6 * 6, 4), nn.Softmax(1))


def are_gone(tensors: "list[weakref.ref[Tensor]]") -> bool:
    gc.collect()
    return all(each() is None for each in tensors)


def test_what_looks_at_a_pass_keeps_nothing_of_it() -> None:
    """Graphs of autograd that a hook goes around in are never collected."""
    placement = workload_of(network(), torch.ones(2, 1, 8, 8), 2).place(Plan(Mesh((), ())))
    profiler = Profiler(placement, 0, CPU)
    profiler.run(enough=1)
    weights = [weakref.ref(tensor) for tensor in profiler._tensors]
    assert len(weights) > 4
    del profiler
    assert are_gone(weights)

    profiler, update = Profiler(placement, 0, CPU), WatchedUpdate(DeviceClock(CPU))
    profiler._context.enter(0, 0, (2,), CPU)
    (output,) = profiler._program(profiler._tensors, update.of_pass(placement))
    output.square().mean().backward()
    weights = [weakref.ref(tensor) for tensor in profiler._tensors]
    assert {"forward", "backward"} <= {segment.kind for segment in update.segments()}
    del profiler, output
    assert are_gone(weights)

    net = network()

    def alive() -> int:
        gc.collect()
        return sum(isinstance(each, nn.Parameter) for each in gc.get_objects())

    before = alive()
    probe(net, (1, 8, 8), CPU)
    assert alive() == before
