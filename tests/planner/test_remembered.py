"""What was known when a plan was made predicts another plan later, if all its pieces have been measured."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from convoy.models import create
from convoy.planner import score, workload_of
from convoy.planner.cost.costs import Costs, HostCost, Times
from convoy.planner.cost.gradients import Update
from convoy.planner.cost.link import Curve, Link, Links
from convoy.planner.cost.local_op import VIEWS, LocalOp
from convoy.planner.cost.pipeline import Staging
from convoy.planner.cost.store import Device, ProfileStore
from convoy.planner.profiling import local_op_of
from convoy.planner.remembered import recalled, remember
from convoy.plans.plan import Plan

DEVICE = Device("Some CPU", "2.13", "0.1", 1, neighbours=2)
PLAN, STAGED = Plan.parse("filter=2"), Plan.parse("stage=2")
WORKLOAD = workload_of(create("lenet"), torch.empty(1, 1, 28, 28), 8, name="lenet")
PLACEMENT = WORKLOAD.place(PLAN)
LINK = Link(Curve(((1, 1e-5), (1000, 1e-4))), Curve(((1, 2e-5),)), overlap=True, cpu_share=0.5)


def by_flops(op: LocalOp) -> Times:
    return Times(op.flops.forward / 1e10, op.flops.backward / 1e10) if op.op not in VIEWS else Times()


COSTS = Costs(
    by_flops,
    Links({(0, 1): LINK}),
    Update(1e-9, 1e-6, 1e-4, divisible=True),
    input=HostCost(per_sample=1.0),
    loss=HostCost(1e-3),
    per_transfer=Times(1e-6, 2e-6),
    per_parameter=1e-7,
)


def measured(plan: Plan) -> dict[LocalOp, Times]:
    placement = WORKLOAD.place(plan)
    ops = (local_op_of(WORKLOAD, placement, placed, rank) for rank in (0, 1) for placed in placement.calls)
    return {op: by_flops(op) for op in ops if op.op not in VIEWS and not op.is_empty}


def test_a_given_plan_is_predicted_without_its_input_and_stages_as_stages(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    remember(store, DEVICE, 2, "sgd", COSTS)
    store.put(DEVICE, measured(PLAN), "run")
    prediction = recalled(ProfileStore(tmp_path), DEVICE, "sgd", PLAN, PLACEMENT, 1)
    kinds, reference = (
        one.timeline.by_kind() for one in (prediction, score(WORKLOAD, PLAN, replace(COSTS, input=HostCost())))
    )
    for kind in ("forward", "backward", "update", "around"):
        assert kinds[kind] == pytest.approx(reference[kind])
    assert prediction.memory.total > 0
    placement, staging = WORKLOAD.place(STAGED), Staging.of(STAGED, WORKLOAD.graph, WORKLOAD.outputs, (8, 8))
    store.put(DEVICE, measured(STAGED))
    staged = recalled(store, DEVICE, "sgd", STAGED, placement, 2, staging=staging)
    whole = recalled(store, DEVICE, "sgd", STAGED, placement, 2)
    first, second, both = (
        sum(span.task.seconds for span in one.timeline.spans if span.task.rank == rank and span.task.kind == "forward")
        for one, rank in ((staged, 0), (staged, 1), (whole, 0))
    )
    assert 0 < first < both and first + second == pytest.approx(both) and staged.bubble > 0


def test_what_is_not_known_predicts_nothing(tmp_path: Path) -> None:
    store, ops = ProfileStore(tmp_path), measured(PLAN)
    lost = dict([ops.popitem()])
    remember(store, DEVICE, 2, "sgd", COSTS)

    def is_known(device: Device = DEVICE, optimizer: str = "sgd") -> bool:
        return recalled(store, device, optimizer, PLAN, PLACEMENT, 1) is not None

    store.put(DEVICE, ops)
    assert not is_known()
    store.put(DEVICE, lost)
    assert is_known() and not is_known(optimizer="adam") and not is_known(replace(DEVICE, threads=2))
    store.note(DEVICE, "2 devices, sgd", {"links": "damaged"})
    assert not is_known()
