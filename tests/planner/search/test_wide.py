"""Where very much meets: strategies that are left out by proof, and layers that have one strategy together."""

import itertools

import pytest

from convoy.planner.search import search
from convoy.planner.search import solve as solving
from convoy.planner.search.layers import alone, tied, tied_where_wide
from convoy.planner.search.prices import AXIS_STRATEGIES
from convoy.plans.mesh import Mesh
from planner.search.nets import Branches, Nested, captured
from planner.search.synthetic import Roofline, brute_force
from small_nets import Dense

COSTS = Roofline(flops=1e9, rate=3e8, latency=1e-5)
ONE = Mesh(("gpu",), (2,))
TWO = Mesh(("node", "gpu"), (2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("costs", [COSTS, Roofline(flops=3e8, rate=1e8), Roofline(flops=1e10, rate=5e7)])
@pytest.mark.parametrize("model", [Branches(3), Branches(2)])
def test_what_is_left_out_is_not_in_the_best_plan(model, costs, monkeypatch):
    graph = captured(model, 16)
    pruned = search(graph, 4, costs, on=[TWO], tolerance=0.0)
    monkeypatch.setattr(solving.Solver, "_possible", lambda self: self.allowed)
    assert pruned.exact
    assert pruned.best.seconds == pytest.approx(
        search(graph, 4, costs, on=[TWO], tolerance=0.0).best.seconds, rel=1e-12
    )


def test_layers_of_one_role_are_tied_and_the_result_says_so(monkeypatch):
    graph = captured(Dense(), 8)
    groups = tied_where_wide(alone(graph), graph, 2)
    assert ("convs.0", "convs.1", "convs.2") in groups
    original = solving.tied_where_wide
    monkeypatch.setattr(solving, "tied_where_wide", lambda groups, graph, most: original(groups, graph, 2))
    found = search(graph, 2, COSTS, on=[ONE], tolerance=0.0)
    assert not found.exact
    assert "3 layers were given one strategy between them" in found.notes[0]
    every = [(strategy,) for strategy in AXIS_STRATEGIES]
    layers = ["stem", "convs.0", "convs.1", "convs.2", "head"]
    least = min(
        min(
            brute_force(
                graph, ONE, COSTS, {**dict.fromkeys(layers, every), **{layer: [one] for layer in layers[1:4]}}
            ).values()
        )
        for one in every
    )
    assert found.best.seconds == pytest.approx(least, rel=1e-12)


def test_a_small_limit_ties_until_it_can_be_done(monkeypatch):
    graph = captured(Nested())
    exact = search(graph, 2, COSTS, on=[ONE], tolerance=0.0)
    monkeypatch.setattr(solving, "LIMIT", 40)
    found = search(graph, 2, COSTS, on=[ONE], tolerance=0.0)
    assert exact.exact
    assert not found.exact
    assert found.best.seconds >= exact.best.seconds


def test_ties_stay_in_their_module():
    graph = captured(Branches(3))
    groups = tied(alone(graph), ["ways.0", "ways.1"], graph)
    assert ("ways.0", "ways.1", "ways.2") in groups
    assert ("stem",) in groups and ("last",) in groups
    assert len(list(itertools.chain(*groups))) == 5
