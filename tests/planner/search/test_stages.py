"""Cuts against all cuts, and plans with stages where they must win."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import nn

from convoy.graph.graph import Ref
from convoy.graph.tree import leaves
from convoy.ops.postponed import postpones
from convoy.ops.recompute import recomputing
from convoy.planner.cost.additive import Additive
from convoy.planner.cost.costs import Costs, Times
from convoy.planner.cost.gradients import Update
from convoy.planner.cost.link import Links, Rate
from convoy.planner.cost.local_op import local_bytes
from convoy.planner.cost.pipeline import StageTimes, Staging, pipeline_seconds
from convoy.planner.cost.prediction import rank_memory
from convoy.planner.search import additive_seconds
from convoy.planner.search.cuts import Bounds, Chain, InPasses, best_cuts, cuts_of
from convoy.planner.search.stages import search_stages
from convoy.plans.layout import balanced
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from convoy.plans.schedule import SCHEDULES, Schedule, actions
from convoy.plans.stages import StagedGraph, Stages
from convoy.plans.traffic import needs_gradient
from planner.search import nets
from planner.search.nets import Branches, Nested, Residual, Twice, captured

EVEN = nets.Costs()
SLOW = Links(otherwise=lambda ranks: Rate(1e-5, 1e6).link(len(ranks), overlap=True, cpu_share=0.0))
FAST = Links(otherwise=lambda ranks: Rate(0.0, 1e12).link(len(ranks), overlap=True, cpu_share=0.0))


def update(model: nn.Module, passes: int, costs: Any, samples: int = 16, recompute: bool = False) -> InPasses:
    graph = recomputing(captured(model, samples // passes), recompute)
    outputs = tuple(ref.name for ref in leaves(graph.output, Ref))
    parts = lambda count: balanced(samples // passes, count)  # noqa: E731
    return InPasses(graph, outputs, passes, parts, replace(costs, passes=passes))


def at(model: nn.Module, costs: Any, samples: int = 16, recompute: bool = False) -> Callable[[int], InPasses]:
    return lambda passes: update(model, passes, costs, samples, recompute)


def convolutions(count: int) -> nn.Module:
    return nn.Sequential(*[nn.Conv2d(3, 3, 3, padding=1) for _ in range(count)])


def test_no_cuts_cost_less() -> None:
    """Stages of any costs, some of which cannot be."""
    for seed in range(20):
        draw = np.random.default_rng(seed)
        stages, points = int(draw.integers(2, 5)), int(draw.integers(6, 11))
        through = [draw.random((points, points)) for _ in range(stages)]
        rest = [draw.random((points, points)) * draw.choice([0.1, 1, 10]) for _ in range(stages)]
        for seconds in through:
            seconds[draw.random((points, points)) < 0.2] = np.inf
        bounds = Bounds(through, rest)
        every = itertools.combinations(range(1, points - 1), stages - 1)
        least = min(bounds.seconds((0, *cuts, points - 1)) for cuts in every)
        result = best_cuts(bounds)
        assert bounds.seconds(result[0]) == pytest.approx(least, rel=1e-12) if result else least == np.inf
    sums = np.arange(9.0)
    seconds = sums[None, :] - sums[:, None]
    sends = np.zeros((9, 9))
    sends[:5, 4] = 5.0  # a large message just in the middle: halves of the work are not the answer
    bounds = Bounds([seconds + sends, seconds], [3 * np.maximum(seconds, sends), 3 * seconds])
    assert bounds.seconds((0, 4, 8)) > bounds.seconds(best_cuts(bounds)[0])


@pytest.mark.parametrize(("make", "plan"), [(Residual, "sample=2"), (Nested, "serial"), (Twice, "serial")])
def test_a_chain_is_the_sum_of_its_parts_and_sends_what_the_engine_sends(make: Any, plan: str) -> None:
    """Of any two cuts the parts cost as much as the whole, and that as much as the search has it, in two passes; the
    gradients of the second are added to those of the first. A byte takes a second, so that the seconds of messages are
    the bytes of the crossings."""
    result = update(make(), 2, EVEN)
    placement = result.place(Plan.parse(plan))
    chain, layouts, graph = Chain(result, placement), placement.layouts, result.graph

    def adding(names: Sequence[str]) -> float:
        return sum(result.costs.adding(graph.values[name], layouts[name], placement.mesh) for name in names)

    whole = 2 * chain.seconds[0, -1] + chain.once[0, -1]
    weights = adding([value.name for value in graph.parameters() if value.name in layouts])
    assert weights > 0 and whole == pytest.approx(additive_seconds(placement, result.costs) + weights, rel=1e-9)
    postponed = [one for one in placement.calls if postpones(one, graph, needs_gradient(graph))]
    names = [one.call.attributes[role] for one in postponed for role in ("weight", "bias")]
    assert 2 * chain.joined[0, -1] == pytest.approx(adding(list(filter(None, names))))
    for a, b, c in itertools.combinations(range(len(chain.cuts)), 3):
        assert chain.seconds[a, b] + chain.seconds[b, c] == pytest.approx(chain.seconds[a, c])
    chain, link = Chain(result, result.place(Plan.parse("serial"))), Rate(0.0, 1.0).link(2, True, 0.0)
    sends, returns, points = chain.sends(link), chain.returns(link), chain.cuts
    size = {name: 4.0 * math.prod(value.shape) for name, value in graph.values.items()}
    for stages in (2, 3):
        for cuts in itertools.combinations(range(1, len(points) - 1), stages - 1):
            cut = Stages.of(graph, stages, ("", *(graph.calls[points[place]].layer for place in cuts)), ())
            cut.owners(graph)  # no weight is used on both sides
            staged = StagedGraph(graph, tuple(result.outputs), cut.of_calls(graph), stages)
            for stage, pair in enumerate(itertools.pairwise((0, *cuts, len(points) - 1))):
                assert sends[pair] == pytest.approx(sum(size[one.value] for one in staged.sent(stage)))
                assert returns[pair] == pytest.approx(sum(size[one.value] for one in staged.received(stage)))


@pytest.mark.parametrize(("make", "plan", "passes"), [(Nested, "serial", 4), (Residual, "filter=2", 1)])
def test_stages_hold_what_is_said_to_hold_of_their_ranks(make: Any, plan: str, passes: int) -> None:
    """Weights, gradients, momentum, and what a kernel holds while it runs; activations and messages are looked at by
    themselves."""

    def held(memory: Any) -> int:
        return memory.parameters + memory.gradients + memory.optimizer + memory.workspace

    costs = Costs(lambda _: Times(), SLOW, Update(state=1.0))
    result = update(make(), passes, EVEN)
    result = replace(result, costs=Additive(costs, result.graph, passes))
    inner = Plan.parse(plan)
    placement = result.place(inner)
    chain = Chain(result, placement)
    largest = max(local_bytes(placement, one.name, 0) for one in result.graph.parameters())
    assert chain.held[0, -1] == pytest.approx(held(rank_memory(placement, costs)[0]) + (passes > 1) * largest)
    staged = Plan(Mesh(("stage", *inner.mesh.names), (2, *inner.mesh.sizes)), inner.layers)
    for cut in range(1, len(chain.cuts) - 1):
        one = replace(staged, stages=(result.graph.calls[chain.cuts[cut]].layer,))
        staging = Staging.of(one, result.graph, result.outputs, (16 // passes,) * passes)
        memory = rank_memory(replace(result, costs=None).place(one), costs, staging)
        for stage, pair in enumerate([(0, cut), (cut, -1)]):
            first = next(rank for rank in range(staged.mesh.num_devices) if staging.stage_of(rank) == stage)
            assert chain.held[pair] == pytest.approx(held(memory[first]))


class Wide(nn.Sequential):
    """Layers with many weights for what they compute."""

    def __init__(self, count: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(192, 64), *(nn.Linear(64, 64) for _ in range(count)))


PASSES = (1, 2, 4, 8)


def pipeline_of(chain: Chain, cuts: tuple[int, ...], passes: int, schedule: Schedule) -> float:
    """Seconds of stages by the numbers of their chain; weight gradients take a third of a pass but for what joining
    them saves."""
    link, stages, result = SLOW.otherwise((0, 1)), len(cuts) - 1, []
    for stage, pair in enumerate(itertools.pairwise(cuts)):
        calls = sum(kind == "weights" for kind, _ in actions("zero-bubble", passes, stage, stages))
        third, joined = chain.seconds[pair] / 3, chain.joined[pair] * (passes - calls) / max(1, passes - 1)
        weights = max(0.0, third - joined) if schedule == "zero-bubble" else third
        sends, returns = chain.sends(link)[pair], chain.returns(link)[pair]
        result.append(StageTimes(third, third + weights, sends, returns, chain.once[pair], weights))
    return pipeline_seconds(result, passes, schedule)


@pytest.mark.parametrize(
    ("model", "devices", "bandwidth"),
    [
        (Residual(), 3, 1e11),
        (Branches(), 2, 1e11),
        (Wide(8), 2, 1e8),
        pytest.param(Wide(8), 4, 1e8, marks=pytest.mark.slow),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, nn.Module) else str(one),
)
def test_the_cuts_are_those_of_the_fastest_pipeline(model: nn.Module, devices: int, bandwidth: float) -> None:
    """Against all cuts of as many stages in all numbers of passes, each simulated; what is simulated are the best sums.
    Zero-bubble adds fewer weight gradients up, which takes most of the time where memory is slow."""
    costs = nets.Costs(flops=1e8, rate=1e6, bandwidth=bandwidth)
    result = search_stages(at(model, costs), PASSES, devices, SLOW, top=9)
    best = next(one for one in result if one.plan.mesh.sizes == (devices,))
    chains = {}
    for passes in PASSES:
        one = update(model, passes, costs)
        chains[passes] = Chain(one, one.place(Plan.parse("serial")))
    last = len(chains[1].cuts) - 1
    every = [(0, *cuts, last) for cuts in itertools.combinations(range(1, last), devices - 1)]
    choices = itertools.product(chains.items(), every, SCHEDULES)
    least = min(pipeline_of(chain, cuts, passes, schedule) for (passes, chain), cuts, schedule in choices)
    assert least * (1 - 1e-9) <= best.seconds <= 1.03 * least
    if len(every) > 10:  # negative control: a careless cut
        careless = (0, *range(last - devices + 1, last), last)
        assert pipeline_of(chains[best.passes], careless, best.passes, best.schedule) > 1.05 * least


def test_memory_decides_about_cuts_and_schedules() -> None:
    costs, model = nets.Costs(flops=1e8, rate=1e6, latency=0.0), convolutions(12)
    one = 3 * 8 * 8 * 4  # an activation of a sample

    def result(limit: float | None, recompute: bool = False, schedules: Any = ("gpipe", "1f1b")) -> Any:
        options = {"memory_limit": limit, "schedules": schedules}
        return search_stages(at(model, costs, recompute=recompute), (16,), 4, FAST, **options)

    whole = result(None)[0]
    assert result(16 * 4 * one + 10_000)[0].seconds == pytest.approx(whole.seconds)
    assert result(16 * 6 * one + 10_000, schedules=SCHEDULES)[0].schedule == "zero-bubble"
    small = result(4 * 4 * one + 4_000, schedules=SCHEDULES)[0]  # the others would keep all 16 passes
    assert small.schedule == "1f1b"
    least = 4 * 2 * one + 4_000  # of every pass what the first stage receives and sends
    assert result(least, recompute=True)[0].seconds == pytest.approx(whole.seconds)
    assert result(least)[0].seconds > 1.5 * whole.seconds, "the first stages can be of one layer each"
    assert result(one) == []


def test_weights_that_several_layers_use_are_in_one_stage() -> None:
    graph = captured(Twice())
    layers = [graph.calls[point].layer for point in cuts_of(graph)[:-1]]
    assert "tied" not in layers and "again" in layers
