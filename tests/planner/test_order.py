"""Of plans that are predicted to be about as fast, the one that redistributes least often is taken."""

import torch

from convoy.planner import workload_of
from convoy.planner.cost.memory import RankMemory
from convoy.planner.cost.prediction import Scored
from convoy.planner.cost.simulation import simulate
from convoy.planner.planner import ordered
from convoy.plans.plan import Plan
from convoy.plans.timeline import Task
from small_nets import SMALL_NETS


def scored(text: str, seconds: float) -> Scored:
    workload = workload_of(SMALL_NETS["depthwise"](), torch.zeros(8, 3, 16, 16), 8)
    plan = Plan.parse(text)
    timeline = simulate([Task(0, "compute", "forward", "", "", seconds)])
    return Scored(plan, workload.place(plan), timeline, RankMemory(0, 0, 0, 0, 0, 0))


def test_luck_is_not_taken_for_gain() -> None:
    filters, samples, rows = scored("filter=2", 0.0995), scored("sample=2", 0.1), scored("height=2", 0.2)
    assert [one.plan for one in ordered([rows, filters, samples])] == [samples.plan, filters.plan, rows.plan]


def test_a_real_gain_is_taken() -> None:
    filters, samples = scored("filter=2", 0.09), scored("sample=2", 0.1)
    assert ordered([samples, filters])[0] is filters


def test_nothing_to_order() -> None:
    assert ordered([]) == []
