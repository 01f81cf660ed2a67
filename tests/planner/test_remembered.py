"""What was known when a plan was made predicts another plan later, if all its pieces have been measured."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from convoy.engine.watched import Segment
from convoy.models import create
from convoy.planner import Workload, score, workload_of
from convoy.planner.cost.costs import Costs, HostCost
from convoy.planner.cost.device import Device
from convoy.planner.cost.gradients import Update
from convoy.planner.cost.link import Curve, Link, Links
from convoy.planner.cost.local_op import VIEWS, LocalOp
from convoy.planner.cost.pipeline import Staging
from convoy.planner.cost.store import ProfileStore
from convoy.planner.cost.times import Times
from convoy.planner.profiling import local_op_of
from convoy.planner.remembered import measured_ops, recalled, remember
from convoy.plans.plan import Plan

DEVICE = Device("Some CPU", "2.13", "0.1", 1, neighbours=2)
PLAN = Plan.parse("filter=2")


def by_flops(local_op: LocalOp) -> Times:
    return Times(local_op.flops.forward / 1e10, local_op.flops.backward / 1e10) if local_op.op not in VIEWS else Times()


LINK = Link(Curve(((1, 1e-5), (1000, 1e-4))), Curve(((1, 2e-5),)), overlap=True, cpu_share=0.5)
COSTS = Costs(
    by_flops,
    Links({(0, 1): LINK}),
    Update(1e-9, 1e-6, 1e-4, divisible=True),
    input=HostCost(per_sample=1.0),
    loss=HostCost(1e-3),
    per_transfer=Times(1e-6, 2e-6),
    per_parameter=1e-7,
)


@pytest.fixture
def workload() -> Workload:
    return workload_of(create("lenet"), torch.empty(1, 1, 28, 28), 8, name="lenet")


def measured(workload: Workload) -> dict[LocalOp, Times]:
    placement = workload.place(PLAN)
    return {
        one: by_flops(one)
        for rank in (0, 1)
        for one in (local_op_of(workload, placement, placed, rank) for placed in placement.calls)
        if one.op not in VIEWS and not one.is_empty
    }


def test_a_given_plan_is_predicted_without_its_input(workload: Workload, tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    remember(store, DEVICE, 2, "sgd", COSTS)
    store.put(DEVICE, measured(workload), "run")
    found = recalled(ProfileStore(tmp_path), DEVICE, "sgd", PLAN, workload.place(PLAN), 1)
    assert found is not None
    kinds, wanted = (one.timeline.by_kind() for one in (found, score(workload, PLAN, replace(COSTS, input=HostCost()))))
    for kind in ("forward", "backward", "update", "around"):
        assert kinds[kind] == pytest.approx(wanted[kind])
    assert found.memory.total > 0


def test_stages_are_predicted_as_stages(workload: Workload, tmp_path: Path) -> None:
    store, plan = ProfileStore(tmp_path), Plan.parse("stage=2", num_devices=2)
    placement = workload.place(plan)
    staging = Staging.of(plan, workload.graph, workload.outputs, (8, 8))
    assert staging is not None
    remember(store, DEVICE, 2, "sgd", COSTS)
    own = {
        local_op_of(workload, placement, placed, rank): rank
        for rank in (0, 1)
        for placed in staging.part(placement, rank).calls
    }
    store.put(DEVICE, {one: by_flops(one) for one in own if one.op not in VIEWS})
    found = recalled(store, DEVICE, "sgd", plan, placement, 2, staging=staging)
    whole = recalled(store, DEVICE, "sgd", plan, placement, 2)
    assert found is not None and whole is not None
    first, second, both = (
        sum(span.task.seconds for span in one.timeline.spans if span.task.rank == rank and span.task.kind == "forward")
        for one, rank in ((found, 0), (found, 1), (whole, 0))
    )
    assert 0 < first < both and first + second == pytest.approx(both)
    assert found.bubble > 0


def test_what_is_not_known_predicts_nothing(workload: Workload, tmp_path: Path) -> None:
    store, placement = ProfileStore(tmp_path), workload.place(PLAN)
    local_ops = measured(workload)
    lost = local_ops.popitem()
    remember(store, DEVICE, 2, "sgd", COSTS)
    store.put(DEVICE, local_ops)
    assert recalled(store, DEVICE, "sgd", PLAN, placement, 1) is None
    store.put(DEVICE, dict([lost]))
    assert recalled(store, DEVICE, "sgd", PLAN, placement, 1) is not None
    assert recalled(store, DEVICE, "adam", PLAN, placement, 1) is None
    assert recalled(store, replace(DEVICE, threads=2), "sgd", PLAN, placement, 1) is None
    store.note(DEVICE, "2 devices, sgd", {"links": "damaged"})
    assert recalled(store, DEVICE, "sgd", PLAN, placement, 1) is None


@pytest.mark.parametrize(("host", "learns"), [(0.0, True), (5e-4, True), (2e-3, False)])
def test_a_run_in_which_a_gpu_waited_for_its_host_teaches_nothing(
    workload: Workload, host: float, learns: bool
) -> None:
    placement = workload.place(PLAN)
    segments = [
        Segment(way, placed.call.name, 1e-3, 0, host) for placed in placement.calls for way in ("forward", "backward")
    ]
    update = SimpleNamespace(placements=[placement], segments=lambda: segments)
    found = measured_ops([update], 0, "sync", 0)  # type: ignore[list-item]
    assert bool(found) == learns
    assert set(found.values()) <= {Times(1e-3, 1e-3)}
