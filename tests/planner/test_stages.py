"""Plans with stages through the planner, from costs that are given: passes, unequal devices, memory."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from convoy.errors import TooLargeError
from convoy.hardware.catalog import Hop
from convoy.models import create
from convoy.planner.cost.costs import Costs, Roofline
from convoy.planner.cost.link import Links, ring
from convoy.planner.planner import propose, score
from convoy.planner.search.layers import Constraints
from convoy.planner.search.stages import search_stages
from convoy.planner.workload import Workload, workload_of
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan

SERIAL, STAGES = Plan(Mesh((), ())), Plan.parse("stage=2")
GIGABIT = Hop(5e-5, 1.1e8)
SLOW_CORE = Roofline(flops_per_s=5e10, bytes_per_s=1e10, overhead_s=0.0)


def costs(times: Roofline = SLOW_CORE, slowdowns: tuple[float, ...] = ()) -> Costs:
    links = Links(otherwise=lambda ranks: ring(GIGABIT, len(ranks), overlap=True, cpu_share=0.3))
    return Costs(times, links, batch_norm="microbatch", slowdowns=slowdowns)


def network(batch: int = 32) -> Workload:
    layers = (nn.Conv2d(3 if number == 0 else 8, 8, 3, padding=1) for number in range(8))
    return workload_of(nn.Sequential(*layers), torch.zeros(1, 3, 32, 32), batch)


def test_unequal_devices_give_nine_tenths_of_their_speeds() -> None:
    """Speeds of 1 : 0.5: stages take equally long, as the faster device has more."""
    images, in_parts = torch.zeros(1, 3, 64, 64), {"batch_norm": "microbatch", "microbatch": 16}
    resnet50 = workload_of(create("resnet50"), images, 512, name="resnet50", **in_parts)
    device_costs = costs(slowdowns=(2 / 3, 4 / 3))
    plans = search_stages(resnet50, 2, device_costs)
    best = min((score(resnet50, one.plan, device_costs, one.passes) for one in plans), key=lambda one: one.seconds)
    one_device = score(resnet50, SERIAL, replace(device_costs, slowdowns=())).seconds
    speeds = 3 / 2 + 3 / 4
    assert one_device / best.seconds >= 0.9 * speeds
    even = score(resnet50, STAGES, device_costs, best.passes)
    assert one_device / even.seconds < 0.75 * speeds  # the control: stages of equal work


def test_the_schedule_and_the_passes_are_those_that_fit_or_a_sentence_says_what_would() -> None:
    workload = replace(network(), schedules=("gpipe", "1f1b"))
    free, least = score(workload, STAGES, costs()), score(workload, STAGES, costs(), 32).memory.total
    limit = (least + free.memory.total) / 2
    result = score(workload, STAGES, costs(), memory_limit=limit)
    assert least <= result.memory.total <= limit < free.memory.total
    assert result.staging.schedule == "1f1b" and result.passes > free.passes
    still = r"^no plan fits: stage=4 in 32 passes, of equal work, still needs "
    with pytest.raises(TooLargeError, match=still) as caught:  # four stages need less than any plan without stages
        propose(network(), 4, costs(), Constraints(memory_limit=2.1e5), [])
    assert "--recompute" not in str(caught.value)  # by which a pass through the whole network would fit
