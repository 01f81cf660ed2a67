"""Cuts against all cuts, and plans with stages where they must win."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from convoy.hardware.catalog import Hop
from convoy.planner.cost.additive import Additive
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.link import Links, ring
from convoy.planner.cost.simulation import StageTimes, pipeline_seconds
from convoy.planner.search.cuts import Chain
from convoy.planner.search.layers import Constraints
from convoy.planner.search.stages import search_stages
from convoy.planner.workload import Workload, workload_of
from convoy.plans.plan import Plan
from convoy.plans.schedule import SCHEDULES, Schedule, actions
from planner.search import nets
from planner.search.nets import Branches, Residual

SLOW = Links(otherwise=lambda ranks: ring(Hop(1e-5, 1e6), len(ranks), overlap=True, cpu_share=0.0))
FAST = Links(otherwise=lambda ranks: ring(Hop(0.0, 1e12), len(ranks), overlap=True, cpu_share=0.0))
PASSES = (1, 2, 4, 8)


def staged(model: nn.Module, **options: Any) -> Workload:
    """An update of 16 samples, in any of the `PASSES`."""
    return replace(workload_of(model, torch.zeros(1, 3, 8, 8), 16, **options), counts=PASSES)


def chain_of(job: Workload, costs: Costs, plan: str = "serial") -> Chain:
    return Chain(job.place(Plan.parse(plan)), Additive(costs, job.graph, job.passes))


class Wide(nn.Sequential):
    """Layers with many weights for what they compute."""

    def __init__(self, count: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(192, 64), *(nn.Linear(64, 64) for _ in range(count)))


def pipeline_of(chain: Chain, cuts: tuple[int, ...], passes: int, schedule: Schedule) -> float:
    """Seconds of stages by the numbers of their chain; weight gradients take a third of a pass but for what computing
    them together saves."""
    (sends, returns), stages, result = chain.messages(SLOW.otherwise((0, 1))), len(cuts) - 1, []
    for stage, pair in enumerate(itertools.pairwise(cuts)):
        calls = sum(kind == "weights" for kind, _ in actions("zero-bubble", passes, stage, stages))
        third, saved = chain.seconds[pair] / 3, chain.saved[pair] * (passes - calls) / max(1, passes - 1)
        weights = max(0.0, third - saved) if schedule == "zero-bubble" else third
        result.append(StageTimes(third, third + weights, sends[pair], returns[pair], chain.once[pair], weights))
    return pipeline_seconds(result, passes, schedule)


@pytest.mark.parametrize(
    ("model", "devices", "memory"),
    [
        (Branches(), 2, 1e11),
        (Wide(8), 2, 1e8),
        pytest.param(Residual(), 3, 1e11, marks=pytest.mark.slow),
        pytest.param(Wide(8), 4, 1e8, marks=pytest.mark.slow),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, nn.Module) else str(one),
)
def test_the_cuts_are_those_of_the_fastest_pipeline(model: nn.Module, devices: int, memory: float) -> None:
    """Against all cuts of as many stages in all numbers of passes, each simulated; what is simulated are the best sums.
    Zero-bubble adds fewer weight gradients up, which takes most of the time where memory is slow."""
    job, costs = staged(model), replace(nets.costs(flops=1e8, memory=memory), links=SLOW)
    best = next(one for one in search_stages(job, devices, costs, top=9) if one.plan.mesh.sizes == (devices,))
    chains = {passes: chain_of(job.through(devices, passes), costs) for passes in PASSES}
    last = len(chains[1].cuts) - 1
    every = [(0, *cuts, last) for cuts in itertools.combinations(range(1, last), devices - 1)]
    choices = itertools.product(chains.items(), every, SCHEDULES)
    least = min(pipeline_of(chain, cuts, passes, schedule) for (passes, chain), cuts, schedule in choices)
    assert least * (1 - 1e-9) <= best.seconds <= 1.03 * least
    if len(every) > 10:  # negative control: a careless cut
        careless = (0, *range(last - devices + 1, last), last)
        assert pipeline_of(chains[best.passes], careless, best.passes, best.schedule) > 1.05 * least


def test_memory_decides_about_cuts_and_schedules() -> None:
    costs = replace(nets.costs(flops=1e8), links=FAST, on_cpu=False)
    one = 3 * 8 * 8 * 4  # an activation of a sample

    def result(limit: float | None, recompute: bool = False, schedules: Any = ("gpipe", "1f1b")) -> Any:
        layers = nn.Sequential(*[nn.Conv2d(3, 3, 3, padding=1) for _ in range(12)])
        job = replace(staged(layers, recompute=recompute), counts=(16,), schedules=schedules)
        return search_stages(job, 4, costs, Constraints(memory_limit=limit))

    whole = result(None)[0]
    assert result(16 * 4 * one + 10_000)[0].seconds == pytest.approx(whole.seconds)
    assert result(16 * 6 * one + 10_000, schedules=SCHEDULES)[0].schedule == "zero-bubble"
    small = result(4 * 4 * one + 4_000, schedules=SCHEDULES)[0]  # the others would keep all 16 passes
    assert small.schedule == "1f1b"
    least = 4 * 2 * one + 4_000  # of every pass what the first stage receives and sends
    assert result(least, recompute=True)[0].seconds == pytest.approx(result(None, recompute=True)[0].seconds)
    assert result(least)[0].seconds > 1.1 * whole.seconds, "the first stages can be of one layer each"
    assert result(one) == []


def test_the_layers_of_a_stage_have_the_strategies_that_are_allowed() -> None:
    costs, among = replace(nets.costs(flops=1e7), links=FAST), Constraints(strategies=("filter",))
    plans = [one.plan for one in search_stages(staged(Wide(8)), 4, costs, among, top=9)]
    assert [plan for plan in plans if plan.mesh.sizes == (2, 2)]
    assert all(plan.strategy("5", "linear")[1:] in ((), ("filter",)) for plan in plans)
