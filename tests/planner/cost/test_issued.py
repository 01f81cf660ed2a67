"""Devices that wait for their hosts: simulated chains whose answers are known."""

import random
from dataclasses import replace

import pytest
import torch

from convoy.models import create
from convoy.planner import score, workload_of
from convoy.planner.cost.calibrated import Calibrated
from convoy.planner.cost.costs import Costs, HostCost
from convoy.planner.cost.gradients import Update, issuing
from convoy.planner.cost.link import Curve, Link, Links
from convoy.planner.cost.local_op import LocalOp, Operand
from convoy.planner.cost.simulation import simulate
from convoy.planner.cost.times import Times
from convoy.plans.plan import Plan
from convoy.plans.timeline import Task, Timeline


def chain(*kernels: tuple[float, float], rank: int = 0) -> list[Task]:
    """Kernels one after the other, by seconds of the host and of the device."""
    return [
        Task(rank, "compute", "forward", f"layer{number}", f"call{number}", device, host=host)
        for number, (host, device) in enumerate(kernels)
    ]


def period(kernels: list[tuple[float, float]], updates: int = 200) -> float:
    """Seconds from one update to the next after many, by the definition."""
    host = device = before = 0.0
    for _ in range(updates):
        before = device
        for issued, seconds in kernels:
            host += issued
            device = max(device, host) + seconds
    return device - before


def test_a_slow_host_decides_how_long_an_update_takes() -> None:
    timeline = simulate(chain(*[(3.0, 1.0)] * 10))
    assert timeline.total == pytest.approx(30)
    kinds = timeline.by_kind()
    assert (kinds["forward"], kinds["issuing"], kinds["idle"]) == pytest.approx((10, 20, 0))


def test_a_slow_device_never_waits() -> None:
    timeline = simulate(chain(*[(1.0, 3.0)] * 10))
    assert timeline.total == 30 and "issuing" not in timeline.by_kind()


@pytest.mark.parametrize("first", [True, False])
def test_small_kernels_are_issued_while_large_ones_run(first: bool) -> None:
    """The small kernels alone take their host 20 s, but it has been ahead since the update before."""
    small, large = [(2.0, 1.0)] * 10, [(1.0, 4.0)] * 10
    assert simulate(chain(*(small + large if first else large + small))).total == pytest.approx(50)


def test_a_kernel_begins_when_the_device_is_free_and_it_is_issued() -> None:
    timeline = simulate(chain((2.0, 3.0), (2.0, 1.0), (8.0, 1.0)))
    spans = [(span.ready, span.start, span.end) for span in timeline.spans]
    # The host ends at 12 with an update, the device a second later, so the host of the next begins at -1.
    assert spans == [(0, 1, 4), (4, 4, 5), (5, 11, 12)]


def test_any_chain_takes_what_many_updates_take_each() -> None:
    draws = random.Random(5)
    for _ in range(200):
        kernels = [(draws.choice([0.5, 1, 4]), draws.choice([0.25, 1, 6])) for _ in range(draws.randint(1, 12))]
        assert simulate(chain(*kernels)).total == pytest.approx(period(kernels)), kernels


def test_ranks_wait_for_the_host_of_another() -> None:
    def rank(number: int, host: float) -> list[Task]:
        first = chain((host, 2.0), rank=number)[0]
        return [first, Task(number, "transfers", "transfer", "layer0", "x", 1.0, (2 * number,), meeting=7, host=host)]

    timeline = simulate(rank(0, 0.5) + rank(1, 5.0))
    assert timeline.total == pytest.approx(10)
    assert timeline.by_kind(0)["exposed"] == pytest.approx(8)
    assert timeline.by_kind(1)["issuing"] > 0


def test_time_of_the_host_is_part_of_the_layer_that_waits_for_it() -> None:
    """As events measure it."""
    summary = simulate(chain(*[(3.0, 1.0)] * 4)).summary()
    assert summary.parts["forward"] == pytest.approx(12) and summary.parts["waiting"] == 0
    assert sum(layer.computes for layer in summary.layers.values()) == pytest.approx(12)


def predicted(batch: int, host: float, recorded: bool = False, plan: str = "serial") -> Timeline:
    """One update of a small network whose operations take a time by their bytes, and their hosts always the same."""
    workload = workload_of(create("lenet"), torch.zeros(2, 1, 28, 28), batch)

    def times(one: LocalOp) -> Times:
        seconds = 1e-12 * sum(operand.bytes for operand in one.inputs)
        return Times(seconds, 2 * seconds, host, 2 * host)

    links = Links(otherwise=lambda ranks: Link(Curve(((1, 1e-6),)), Curve(((1, 1e-6),))))
    costs = Costs(times, links, Update(host=host, host_per_tensor=host), loss=HostCost(per_pass=1e-6, host=host))
    return score(workload, Plan.parse(plan), replace(costs, on_cpu=False, recorded=recorded)).timeline


def test_small_batches_take_what_the_host_takes_and_large_ones_what_the_device_does() -> None:
    host = 1e-5
    small, double, large = (predicted(batch, host).total for batch in (2, 4, 2**17))
    assert small == double
    assert large == pytest.approx(predicted(2**17, 0.0).total)
    assert small > 20 * predicted(2, 0.0).total


def test_the_host_of_a_recorded_update_does_no_more_than_issue_the_optimizer() -> None:
    """Stages are not recorded."""
    host = 1e-5
    tensors = len(list(create("lenet").parameters()))
    assert predicted(2, host, recorded=True).total == pytest.approx((1 + tensors) * host, rel=0.05)
    assert predicted(2, host).total > 4 * tensors * host
    assert predicted(2, host, True, "stage=2").total == predicted(2, host, False, "stage=2").total


def test_an_operation_that_was_not_measured_takes_its_host_as_long_as_others_of_its_sort() -> None:
    def op(name: str, size: int) -> LocalOp:
        operand = Operand((size, 64), "float32")
        return LocalOp(name, "", (operand,), (operand,))

    measured = {op("relu", 8 << k): Times(1e-6, 2e-6, 1e-5 * (k + 1), 2e-5 * (k + 1)) for k in range(3)}
    times = Calibrated(measured)
    found = times(op("relu", 4096))
    assert (found.host_forward, found.host_backward) == pytest.approx((2e-5, 4e-5))
    assert times(op("gelu", 4096)).host == pytest.approx(6e-5)
    assert Calibrated({one: Times(1e-6, 2e-6) for one in measured})(op("relu", 4096)).host == 0


def test_what_a_host_takes_for_an_optimizer() -> None:
    measured = [(1, 30e-6), (16, 60e-6), (256, 540e-6)]
    assert issuing(measured) == pytest.approx((28e-6, 2e-6))
    assert issuing([(1, 0.0), (16, 0.0)]) == (0.0, 0.0)
    assert issuing([(1, 4e-6), (16, 4e-6)]) == pytest.approx((4e-6, 0.0))
    assert issuing([(1, 1e-6), (100, 300e-6)])[0] == 0.0
    assert Update(host=1.0, host_per_tensor=0.5).issuing(4) == 3.0


def test_a_link_keeps_what_its_host_takes() -> None:
    curve = Curve(((4, 1e-5),))
    plain, link = Link(curve, curve), Link(curve, curve, True, 0.2, host=3e-5)
    assert "host" not in plain.to_dict() and Link.from_dict(plain.to_dict()) == plain
    assert Links.from_list(Links({(0, 1): link}).to_list()).measured == {(0, 1): link}
