"""What comes with the best plan: other candidates, the next best strategy of each layer, memory limits."""

import itertools

import pytest

from convoy.errors import ConvoyError
from convoy.planner.search import search
from convoy.planner.search.prices import meshes
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from planner.search.nets import Chain, Residual, captured
from planner.search.synthetic import Roofline, brute_force, placed_under

COSTS = Roofline(flops=1e9, rate=3e8, latency=1e-5)
ONE = Mesh(("gpu",), (2,))
FEW = ("sample", "filter", "channel", "height")


def test_meshes_are_ordered_factorisations():
    assert [mesh.sizes for mesh in meshes(12)] == [(12,), (2, 6), (3, 4), (4, 3), (6, 2)]
    assert [mesh.sizes for mesh in meshes(8, 3)] == [(8,), (2, 4), (4, 2), (2, 2, 2)]
    assert [mesh.sizes for mesh in meshes(1)] == [()]
    assert meshes(4)[1].names == ("node", "gpu")


def test_one_device():
    found = search(captured(Chain()), 1, COSTS)
    assert str(found.best.plan) == "serial"
    assert found.exact


def test_plain_sample_is_always_among_the_candidates():
    slow = Roofline(flops=1e12, rate=1e6)
    found = search(captured(Residual()), 4, slow, top=1, tolerance=0.0)
    assert Plan.parse("sample=4") in [candidate.plan for candidate in found.candidates]
    assert str(found.best.plan) != "sample=4"
    assert [c.seconds for c in found.candidates] == sorted(c.seconds for c in found.candidates)


def test_candidates_differ_and_meshes_are_compared():
    found = search(captured(Residual(), 16), 4, COSTS, top=4, tolerance=0.0)
    plans = [str(candidate.plan) for candidate in found.candidates]
    assert len(set(plans)) == len(plans) >= 3
    alone = [search(captured(Residual(), 16), 4, COSTS, on=[mesh], tolerance=0.0).best.seconds for mesh in meshes(4)]
    assert found.best.seconds == min(alone)


def test_the_next_best_strategy_of_a_layer_is_what_the_best_plan_with_it_costs():
    graph = captured(Residual())
    found = search(graph, 2, COSTS, on=[ONE], among=FEW, tolerance=0.0)
    layers = ["stem", "block1.0", "block2.0", "project"]
    every = brute_force(graph, ONE, COSTS, {layer: [(one,) for one in FEW] for layer in layers})
    uses = any(one.strategy == ("sample",) for one in found.next_best)
    for one in found.next_best:
        place = layers.index(one.layers[0])
        of_way: dict = {}
        of_any: dict = {}
        for strategies, seconds in every.items():
            given = strategies[place]
            of_any[given] = min(seconds, of_any.get(given, 1.0))
            if any(s == ("sample",) for s in strategies) == uses:
                of_way[given] = min(seconds, of_way.get(given, 1.0))
        assert of_way[one.strategy] == pytest.approx(found.best.seconds)
        # a plan that uses the sample axis no more is one of another way, and costs less there
        assert of_any[one.other] * (1 - 1e-9) <= one.seconds <= of_way.get(one.other, 1.0) * (1 + 1e-9)


def test_a_limit_of_memory_is_kept_and_what_it_costs_is_known():
    graph = captured(Chain(), 64)
    free = search(graph, 2, COSTS, on=[ONE], among=FEW, tolerance=0.0)
    domains = {layer: [(one,) for one in FEW] for layer in ("features.0", "features.2", "fc")}
    every = brute_force(graph, ONE, COSTS, domains)

    def memory(strategies):
        layers = dict(zip(domains, strategies, strict=True))
        plan = Plan(ONE, tuple((layer, {"gpu": given[0]}) for layer, given in layers.items()))
        return COSTS.memory(placed_under(graph, plan))

    needed = sorted({memory(strategies) for strategies in every})
    for limit in (needed[0], needed[len(needed) // 3], free.best.memory):
        found = search(graph, 2, COSTS, on=[ONE], among=FEW, memory_limit=limit)
        best = min(seconds for strategies, seconds in every.items() if memory(strategies) <= limit)
        assert all(candidate.memory <= limit for candidate in found.candidates)
        assert found.best.seconds >= best * (1 - 1e-12)
        if found.exact:
            assert found.best.seconds == pytest.approx(best)
        else:
            assert found.best.seconds <= 1.5 * best
    assert search(graph, 2, COSTS, on=[ONE], among=FEW, memory_limit=free.best.memory).exact


def test_nothing_fits():
    parts = r"\(3.46 kB for outputs of 5 calls, 6.29 kB for parameters and gradients\)"
    said = rf"no plan fits: the smallest needs 9.74 kB on a device {parts}, .* the 1 kB .*; layer fc takes most"
    with pytest.raises(ConvoyError, match=said):
        search(captured(Chain(), 1, 8), 2, COSTS, memory_limit=1000)


def test_parts_that_cannot_be_are_not_searched():
    def parts(count):
        if count > 1:
            raise ConvoyError("one microbatch is not divided")
        return (range(8),)

    found = search(captured(Chain()), 2, COSTS, parts=parts)
    assert all("sample" not in str(candidate.plan) for candidate in found.candidates)


def test_small_batches_leave_no_sample_axes():
    found = search(captured(Chain(), 2), 4, COSTS)
    assert all(Plan.parse("sample=4") != candidate.plan for candidate in found.candidates)
    for candidate, layer in itertools.product(found.candidates, ("features.0", "fc")):
        strategy = candidate.plan.strategy(layer, "conv")
        sizes = [size for size, s in zip(candidate.plan.mesh.sizes, strategy, strict=True) if s == "sample"]
        assert all(size <= 2 for size in sizes)
