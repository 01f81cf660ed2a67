"""What looks at a pass keeps nothing of it: graphs of autograd that a hook goes around in are never collected."""

import gc
import weakref

import torch
from torch import Tensor, nn

from convoy.engine.clock import DeviceClock
from convoy.engine.coupling import probe
from convoy.engine.profiling import Profiler
from convoy.engine.watched import WatchedUpdate
from convoy.planner import workload_of
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan

CPU = torch.device("cpu")


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 6 * 6, 4), nn.Softmax(1))


def are_gone(tensors: list["weakref.ref[Tensor]"]) -> bool:
    gc.collect()
    return all(each() is None for each in tensors)


def test_a_profiler_lets_its_weights_go() -> None:
    workload = workload_of(network(), torch.ones(2, 1, 8, 8), 2)
    profiler = Profiler(workload.place(Plan(Mesh((), ()))), 0, CPU)
    profiler.run(enough=1)
    weights = [weakref.ref(tensor) for tensor in profiler._tensors]
    assert len(weights) > 4
    del profiler
    assert are_gone(weights)


def test_a_watched_update_lets_the_weights_go() -> None:
    placement = workload_of(network(), torch.ones(2, 1, 8, 8), 2).place(Plan(Mesh((), ())))
    profiler, update = Profiler(placement, 0, CPU), WatchedUpdate(DeviceClock(CPU))
    profiler._context.enter(0, 0, (2,), CPU)
    (output,) = profiler._program(profiler._tensors, update.of_pass(placement))
    output.square().mean().backward()
    weights = [weakref.ref(tensor) for tensor in profiler._tensors]
    assert {"forward", "backward"} <= {segment.kind for segment in update.segments()}
    del profiler, output
    assert are_gone(weights)


def test_a_probe_lets_its_copy_of_the_network_go() -> None:
    net = network()

    def alive() -> int:
        gc.collect()
        return sum(isinstance(each, nn.Parameter) for each in gc.get_objects())

    before = alive()
    probe(net, (1, 8, 8), CPU)
    assert alive() == before
