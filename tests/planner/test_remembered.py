"""What was known when a plan was made predicts another plan later, if all its pieces have been measured."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from convoy.models import create
from convoy.planner import Scored, score, workload_of
from convoy.planner.cost.costs import Costs, HostCost, Times
from convoy.planner.cost.gradients import Update
from convoy.planner.cost.link import Curve, Link, Links
from convoy.planner.cost.local_op import VIEWS, LocalOp
from convoy.planner.cost.store import Device, ProfileStore
from convoy.planner.profiling import local_op_of
from convoy.planner.remembered import recalled, remember
from convoy.plans.plan import Plan

DEVICE = Device("Some CPU", "2.13", "0.1", 1, neighbours=2)
PLAN = Plan.parse("filter=2")
WORKLOAD = workload_of(create("lenet"), torch.empty(1, 1, 28, 28), 8, name="lenet")
PLACEMENT = WORKLOAD.place(PLAN)
LINK = Link(Curve(((1, 1e-5), (1000, 1e-4))), Curve(((1, 2e-5),)), overlap=True, cpu_share=0.5)


def by_flops(op: LocalOp) -> Times:
    return Times(op.flops.forward / 1e10, op.flops.backward / 1e10) if op.op not in VIEWS else Times()


COSTS = Costs(
    by_flops,
    Links({(0, 1): LINK}),
    Update(1e-9, 1e-6, 1e-4),
    input=HostCost(per_sample=1.0),
    loss=HostCost(1e-3),
    per_parameter=1e-7,
)


def measured(plan: Plan) -> dict[LocalOp, Times]:
    placement = WORKLOAD.place(plan)
    ops = (local_op_of(WORKLOAD, placement, placed, rank) for rank in (0, 1) for placed in placement.calls)
    return {op: by_flops(op) for op in ops if op.op not in VIEWS and not op.is_empty}


def test_a_given_plan_is_predicted_without_its_input_where_all_of_it_is_known(tmp_path: Path) -> None:
    store, ops = ProfileStore(tmp_path), measured(PLAN)
    lost = dict([ops.popitem()])
    remember(store, DEVICE, 2, "sgd", COSTS)

    def again(device: Device = DEVICE, optimizer: str = "sgd") -> Scored | None:
        return recalled(ProfileStore(tmp_path), device, optimizer, PLAN, PLACEMENT, 1)

    store.put(DEVICE, ops)
    assert again() is None
    store.put(DEVICE, lost, "run")
    assert again(optimizer="adam") is again(replace(DEVICE, threads=2)) is None
    kinds, reference = (
        one.timeline.by_kind() for one in (again(), score(WORKLOAD, PLAN, replace(COSTS, input=HostCost())))
    )
    for kind in ("forward", "backward", "update", "around"):
        assert kinds[kind] == pytest.approx(reference[kind])
    store.note(DEVICE, "2 devices, sgd", {"links": "damaged"})
    assert again() is None
