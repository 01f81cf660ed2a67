"""Cuts against all cuts, and plans with stages where they must win."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from convoy.graph.graph import Ref
from convoy.graph.tree import leaves
from convoy.ops.postponed import postpones
from convoy.ops.recompute import recomputing
from convoy.planner.cost.additive import Additive
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.gradients import Update
from convoy.planner.cost.link import Links, Rate
from convoy.planner.cost.memory import rank_memory
from convoy.planner.cost.pipeline import StageTimes, Staging, pipeline_seconds
from convoy.planner.cost.times import Times
from convoy.planner.search import additive_seconds
from convoy.planner.search.cuts import Bounds, Chain, InPasses, best_cuts, cuts_of
from convoy.planner.search.stages import search_stages
from convoy.plans.layout import balanced
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from convoy.plans.schedule import SCHEDULES, actions
from convoy.plans.stages import StagedGraph, Stages
from convoy.plans.traffic import needs_gradient
from planner.search.nets import Branches, Nested, Residual, Twice, captured
from planner.search.synthetic import Roofline


def update(model, passes, costs, samples=16, recompute=False):
    graph = recomputing(captured(model, samples // passes), recompute)
    outputs = tuple(ref.name for ref in leaves(graph.output, Ref))
    return InPasses(
        graph, outputs, passes, lambda count: balanced(samples // passes, count), replace(costs, passes=passes)
    )


def every_cut(bounds):
    points = bounds.through[0].shape[0]
    middle = itertools.combinations(range(1, points - 1), len(bounds.through) - 1)
    return [(0, *cuts, points - 1) for cuts in middle]


@pytest.mark.parametrize("seed", range(40))
def test_no_cuts_cost_less(seed):
    """Stages of any costs, some of which cannot be."""
    random = np.random.default_rng(seed)
    stages, points = int(random.integers(2, 5)), int(random.integers(6, 11))
    through = [random.random((points, points)) for _ in range(stages)]
    rest = [random.random((points, points)) * random.choice([0.1, 1, 10]) for _ in range(stages)]
    for own in through:
        own[random.random((points, points)) < 0.2] = np.inf
    bounds = Bounds(through, rest)
    least = min(bounds.seconds(cuts) for cuts in every_cut(bounds))
    found = best_cuts(bounds)
    if not found:
        assert least == np.inf
    else:
        assert bounds.seconds(found[0]) == pytest.approx(least, rel=1e-12)


def test_halves_are_not_the_best_cuts():
    """Negative control: where a message is large just in the middle, the halves of the work are not the answer."""
    work = np.ones(8)
    sums = np.concatenate(([0], np.cumsum(work)))
    seconds = sums[None, :] - sums[:, None]
    sends = np.zeros((9, 9))
    sends[:5, 4] = 5.0
    bounds = Bounds([seconds + sends, seconds], [3 * np.maximum(seconds, sends), 3 * seconds])
    assert bounds.seconds((0, 4, 8)) > bounds.seconds(best_cuts(bounds)[0])
    assert best_cuts(bounds)[0] != (0, 4, 8)


NETS = [Residual(), Branches(3), Nested(), Twice()]


@pytest.mark.parametrize("model", NETS, ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("plan", ["serial", "sample=2"])
def test_a_chain_is_the_sum_of_its_parts(model, plan):
    """Of any two cuts the parts cost as much as the whole, and that as much as the search has it, in two passes; the
    gradients of the second are added to those of the first."""
    costs = Roofline(flops=1e9, rate=3e8, latency=1e-5)
    found = update(model, 2, costs)
    placement = found.place(Plan.parse(plan))
    chain = Chain(found, placement)
    whole = 2 * chain.seconds[0, -1] + chain.once[0, -1]
    layouts, weights = (
        placement.layouts,
        [value for value in found.graph.parameters() if value.name in placement.layouts],
    )
    adding = sum(found.costs.adding(value, layouts[value.name], placement.mesh) for value in weights)
    assert adding > 0
    assert whole == pytest.approx(additive_seconds(placement, found.costs) + adding, rel=1e-9)
    postponed = [one for one in placement.calls if postpones(one, found.graph, needs_gradient(found.graph))]
    names = [one.call.attributes[role] for one in postponed for role in ("weight", "bias")]
    joined = [found.costs.adding(found.graph.values[name], layouts[name], placement.mesh) for name in names if name]
    assert 2 * chain.joined[0, -1] == pytest.approx(sum(joined))
    for cuts in itertools.combinations(range(len(chain.cuts)), 3):
        parts = chain.seconds[cuts[0], cuts[1]] + chain.seconds[cuts[1], cuts[2]]
        assert parts == pytest.approx(chain.seconds[cuts[0], cuts[2]])


@pytest.mark.parametrize("model", NETS, ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("stages", [2, 3])
def test_what_crosses_is_what_the_engine_sends(model, stages):
    """A byte takes a second, so that the seconds of messages are the bytes of the crossings."""
    costs = Roofline(flops=1e9, rate=3e8, latency=1e-5)
    found = update(model, 2, costs)
    chain = Chain(found, found.place(Plan.parse("serial")))
    link = Links(otherwise=lambda ranks: Rate(0.0, 1.0).link(2, overlap=True, cpu_share=0.0)).otherwise((0, 1))
    sends, returns = chain.sends(link), chain.returns(link)
    graph, points = found.graph, chain.cuts
    for cuts in itertools.combinations(range(1, len(points) - 1), stages - 1):
        names = tuple(graph.calls[points[cut]].layer for cut in cuts)
        cut = Stages.of(graph, stages, ("", *names), ())
        cut.owners(graph)  # no weight is used on both sides
        staged = StagedGraph(graph, tuple(found.outputs), cut.of_calls(graph), stages)
        for stage, pair in enumerate(itertools.pairwise((0, *cuts, len(points) - 1))):
            size = {name: 4.0 * torch.Size(value.shape).numel() for name, value in graph.values.items()}
            assert sends[pair] == pytest.approx(sum(size[one.value] for one in staged.sent(stage)))
            assert returns[pair] == pytest.approx(sum(size[one.value] for one in staged.received(stage)))


@pytest.mark.parametrize("model", NETS, ids=lambda model: type(model).__name__)
@pytest.mark.parametrize(("plan", "passes"), [("serial", 1), ("serial", 4), ("filter=2", 4)])
def test_stages_hold_what_is_said_to_hold_of_their_ranks(model, plan, passes):
    """Weights, gradients, momentum, and what a kernel holds while it runs; activations and messages are looked at by
    themselves."""
    costs = Costs(lambda _: Times(), SLOW, Update(state=1.0))
    found = update(model, passes, Roofline(flops=1e9, rate=3e8, latency=1e-5))
    found = replace(found, costs=Additive(costs, found.graph, passes))
    inner = Plan.parse(plan)
    placement = found.place(inner)
    chain = Chain(found, placement)
    assert chain.held[0, -1] == pytest.approx(_held(rank_memory(placement, costs)[0]) + (passes > 1) * _most(placement))
    staged = Plan(Mesh(("stage", *inner.mesh.names), (2, *inner.mesh.sizes)), inner.layers)
    for cut in range(1, len(chain.cuts) - 1):
        name = found.graph.calls[chain.cuts[cut]].layer
        one = replace(staged, stages=(name,))
        staging = Staging.of(one, found.graph, found.outputs, (16 // passes,) * passes)
        memory = rank_memory(replace(found, costs=None).place(one), costs, staging)
        for stage, pair in enumerate([(0, cut), (cut, -1)]):
            first = next(rank for rank in range(staged.mesh.num_devices) if staging.stage_of(rank) == stage)
            assert chain.held[pair] == pytest.approx(_held(memory[first]))


def _held(memory):
    return memory.parameters + memory.gradients + memory.optimizer + memory.workspace


def _most(placement):
    """Bytes of the largest weight."""
    mesh, graph = placement.mesh, placement.graph
    return max(
        4 * math.prod(placement.layouts[one.name].local_shape(one.shape, mesh, (0,) * len(mesh.sizes)))
        for one in graph.parameters()
    )


def at(model, costs, samples=16, recompute=False):
    return lambda passes: update(model, passes, costs, samples, recompute)


SLOW = Links(otherwise=lambda ranks: Rate(1e-5, 1e6).link(len(ranks), overlap=True, cpu_share=0.0))


def convolutions(count):
    return nn.Sequential(*[nn.Conv2d(3, 3, 3, padding=1) for _ in range(count)])


class Wide(nn.Sequential):
    """Layers with many weights for what they compute."""

    def __init__(self, count):
        super().__init__(nn.Flatten(), nn.Linear(192, 64), *(nn.Linear(64, 64) for _ in range(count)))


@pytest.mark.parametrize(
    ("model", "devices", "bandwidth"),
    [
        *((Residual(), 2, 1e11), (Residual(), 3, 1e11), (Branches(2), 2, 1e11), (Branches(2), 3, 1e11)),
        *((Nested(), 2, 1e11), (convolutions(9), 5, 1e11), (Wide(8), 2, 1e8), (Wide(8), 4, 1e8)),
    ],
    ids=lambda one: f"{one:g}" if isinstance(one, float | int) else type(one).__name__,
)
def test_the_cuts_are_those_of_the_fastest_pipeline(model, devices, bandwidth):
    """Against all cuts of as many stages in all numbers of passes, each simulated; what is simulated are the best sums.
    Zero-bubble adds fewer weight gradients up, which takes most of the time where memory is slow."""
    costs = Roofline(flops=1e8, rate=1e6, latency=1e-5, bandwidth=bandwidth)
    found = search_stages(at(model, costs), PASSES, devices, SLOW, top=9)
    best = next(one for one in found if one.plan.mesh.sizes == (devices,))
    chains = {}
    for passes in PASSES:
        own = update(model, passes, costs)
        chains[passes] = Chain(own, own.place(Plan.parse("serial")))
    last = len(chains[1].cuts) - 1
    every = [(0, *cuts, last) for cuts in itertools.combinations(range(1, last), devices - 1)]
    choices = itertools.product(chains.items(), every, SCHEDULES)
    least = min(pipeline_of(chain, cuts, passes, schedule) for (passes, chain), cuts, schedule in choices)
    assert least * (1 - 1e-9) <= best.seconds <= 1.03 * least
    if len(every) > 10:  # negative control: a careless cut
        careless = (0, *range(last - devices + 1, last), last)
        assert pipeline_of(chains[best.passes], careless, best.passes, best.schedule) > 1.05 * least


PASSES = (1, 2, 4, 8)


def pipeline_of(chain, cuts, passes, schedule):
    """Seconds of stages by the numbers of their chain; weight gradients take a third of a pass but for what joining
    them saves."""
    link, stages, found = SLOW.otherwise((0, 1)), len(cuts) - 1, []
    for stage, pair in enumerate(itertools.pairwise(cuts)):
        calls = sum(kind == "weights" for kind, _ in actions("zero-bubble", passes, stage, stages))
        third, joined = chain.seconds[pair] / 3, chain.joined[pair] * (passes - calls) / max(1, passes - 1)
        weights = max(0.0, third - joined) if schedule == "zero-bubble" else third
        sends, returns = chain.sends(link)[pair], chain.returns(link)[pair]
        found.append(StageTimes(third, third + weights, sends, returns, chain.once[pair], weights))
    return pipeline_seconds(found, passes, schedule)


def test_a_faster_device_has_the_larger_stage():
    """Speeds of 1 : 0.5 under stage=2 give at least nine tenths of their sum."""
    costs = Roofline(flops=1e8, rate=1e6, latency=0.0)
    fast = Links(otherwise=lambda ranks: Rate(0.0, 1e12).link(len(ranks), overlap=True, cpu_share=0.0))
    model = convolutions(30)
    alone = Chain(update(model, 1, costs, 64), update(model, 1, costs, 64).place(Plan.parse("serial")))
    one = alone.seconds[0, -1]
    (found,) = search_stages(at(model, costs, 64), (8, 16, 32), 2, fast, slowdowns=(1.0, 2.0), top=1)
    assert one / found.seconds >= 0.9 * 1.5, found
    (other,) = search_stages(at(model, costs, 64), (8, 16, 32), 2, fast, slowdowns=(2.0, 1.0), top=1)
    assert [int(found.plan.stages[1]), int(other.plan.stages[1])] == [20, 10]


def test_memory_decides_about_cuts_and_schedules():
    costs = Roofline(flops=1e8, rate=1e6, latency=0.0)
    fast = Links(otherwise=lambda ranks: Rate(0.0, 1e12).link(len(ranks), overlap=True, cpu_share=0.0))
    model = convolutions(12)
    one = 3 * 8 * 8 * 4  # an activation of a sample

    def found(limit, recompute=False, schedules=("gpipe", "1f1b")):
        options = {"memory_limit": limit, "schedules": schedules}
        return search_stages(at(model, costs, recompute=recompute), (16,), 4, fast, **options)

    whole = found(None)[0]
    assert found(16 * 4 * one + 10_000)[0].seconds == pytest.approx(whole.seconds)
    assert found(16 * 6 * one + 10_000, schedules=SCHEDULES)[0].schedule == "zero-bubble"
    small = found(4 * 4 * one + 4_000, schedules=SCHEDULES)[0]  # the others would keep all 16 passes
    assert small.schedule == "1f1b"
    least = 4 * 2 * one + 4_000  # of every pass what the first stage receives and sends
    assert found(least, recompute=True)[0].seconds == pytest.approx(whole.seconds)
    assert found(least)[0].seconds > 1.5 * whole.seconds, "the first stages can be of one layer each"
    assert found(one) == []


def test_weights_that_several_layers_use_are_in_one_stage():
    graph = captured(Twice())
    points = cuts_of(graph)
    layers = [graph.calls[point].layer for point in points[:-1]]
    assert "tied" not in layers and "again" in layers
