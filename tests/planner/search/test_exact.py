"""The least sum against all plans, each placed and priced by itself."""

import itertools

import pytest

from convoy.planner.search import additive_seconds, search
from convoy.planner.search.prices import AXIS_STRATEGIES, CHOOSING, redistributions
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from planner.search.nets import Branches, Chain, Halves, Nested, Residual, Twice, captured
from planner.search.synthetic import Roofline, brute_force, every_placement, placed_under
from small_nets import Permuted, SqueezeExcite

# rates between those where computing and those where sending decides, so that the best plans are mixed
COSTS = (
    Roofline(flops=1e9, rate=3e8, latency=1e-5),
    Roofline(flops=3e8, rate=1e8, latency=1e-6, bandwidth=1e10),
    Roofline(flops=1e10, rate=5e7, latency=1e-6),
)
ONE = Mesh(("gpu",), (2,))
THREE = Mesh(("gpu",), (3,))
TWO = Mesh(("node", "gpu"), (2, 2))
FEW = ("sample", "filter", "channel", "height")


def _domains(graph, mesh, among):
    layers = dict.fromkeys(call.layer for call in graph.calls if call.op in CHOOSING)
    return {layer: list(itertools.product(among, repeat=len(mesh.sizes))) for layer in layers}


@pytest.mark.parametrize(
    ("model", "mesh", "among"),
    [
        (Chain(), ONE, AXIS_STRATEGIES),
        (Chain(), THREE, AXIS_STRATEGIES),
        (Chain(), TWO, ("sample", "filter", "channel")),
        (Residual(), ONE, FEW),
        (Residual(), ONE, ("sample", "filter", "replicate", "width")),
        (Residual(), TWO, ("sample", "filter")),
        (Branches(2), ONE, FEW),
        (Branches(3), ONE, ("filter", "channel", "height")),
        (Branches(3), THREE, ("sample", "filter", "channel")),
        (Nested(), ONE, FEW),
        (Nested(), THREE, ("sample", "filter", "channel", "replicate")),
        (Twice(), ONE, FEW),
        (Twice(), TWO, ("channel", "filter")),
        (Halves(), ONE, FEW),
        (Permuted(), ONE, ("sample", "height", "filter")),
        (SqueezeExcite(), THREE, ("sample", "filter")),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "forward") else str(getattr(value, "sizes", "")) or None,
)
def test_no_plan_costs_less(model, mesh, among):
    graph = captured(model)
    placements = every_placement(graph, mesh, _domains(graph, mesh, among))
    every = [[additive_seconds(placement, costs) for costs in COSTS] for _, placement in placements]
    for costs, seconds in zip(COSTS, zip(*every, strict=True), strict=True):
        found = search(graph, mesh.num_devices, costs, on=[mesh], among=among, tolerance=0.0)
        assert found.exact
        assert found.best.seconds == pytest.approx(min(seconds), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Chain(), Residual(), Branches(3), Nested(), Twice(), Halves()])
@pytest.mark.parametrize("mesh", [ONE, TWO], ids=str)
def test_a_plan_costs_when_placed_what_the_search_says(model, mesh):
    graph = captured(model, 16)
    for costs in COSTS:
        for candidate in search(graph, mesh.num_devices, costs, top=9).candidates:
            plan = Plan.parse(candidate.plan.to_yaml())
            assert plan == candidate.plan
            placement = placed_under(graph, plan)
            assert additive_seconds(placement, costs) == pytest.approx(candidate.seconds, rel=1e-12)
            assert len(redistributions(placement)) == candidate.redistributions


def test_uneven_parts():
    graph = captured(Residual(), 8)
    parts = {1: (range(8),), 2: (range(6), range(6, 8))}
    every = brute_force(graph, ONE, COSTS[0], _domains(graph, ONE, FEW), parts.__getitem__)
    found = search(graph, 2, COSTS[0], on=[ONE], among=FEW, parts=parts.__getitem__, tolerance=0.0)
    assert found.best.seconds == pytest.approx(min(every.values()), rel=1e-12)
