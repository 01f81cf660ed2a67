"""The plan that is found against all plans, each placed and priced by itself; what comes with it; what people fix."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from convoy.errors import ConvoyError
from convoy.planner.cost.prediction import most, rank_memory
from convoy.planner.search.layers import Constraints
from convoy.planner.search.prices import AXIS_STRATEGIES
from convoy.planner.search.search import search
from convoy.plans.mesh import Mesh
from convoy.plans.plan import Plan
from convoy.plans.traffic import redistributions
from planner.search import nets
from planner.search.nets import COSTS, EVERY, FEW, ONE, THREE, TWO, every_placement, seconds_of, workload


def within(mesh: Mesh, among: Sequence[str] = AXIS_STRATEGIES, **options: Any) -> Constraints:
    return Constraints(meshes=[mesh], strategies=among, **options)


CASES = [
    (nets.Residual, ONE, FEW, {}),
    (nets.Branches, THREE, ("sample", "filter", "channel"), {}),
    (nets.Nested, ONE, FEW, {}),
    (nets.Twice, ONE, FEW, {}),
    (nets.Chain, ONE, FEW, {"shares": (3, 1)}),  # of the samples
    pytest.param(nets.Chain, TWO, ("sample", "filter", "channel"), {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("make", "mesh", "among", "options"), CASES)
def test_no_plan_costs_less_and_none_that_is_about_as_fast_redistributes_less(
    make: Any, mesh: Mesh, among: tuple[str, ...], options: dict[str, Any]
) -> None:
    job, simpler = workload(make(), **options), 0
    placements = [placement for _, placement in every_placement(job, mesh, among)]
    counts = [len(list(redistributions(placement))) for placement in placements]
    for costs in EVERY:
        every = list(zip([seconds_of(job, one, costs) for one in placements], counts, strict=True))
        least = min(seconds for seconds, _ in every)
        # a way to divide the samples that the fastest plan for it does not use is left out, with what is simpler in it
        for tolerance in (0.0, 0.03 if mesh is ONE else 0.01):
            result = search(job, mesh.num_devices, costs, within(mesh, among), tolerance=tolerance)
            best = result.best
            assert result.exact and result.least == pytest.approx(least, rel=1e-12)
            fewest_count, seconds = min((count, s) for s, count in every if s <= least * (1 + tolerance) * (1 + 1e-9))
            assert best.seconds == pytest.approx(seconds if tolerance else least, rel=1e-9)
            assert not tolerance or best.redistributions == fewest_count
            # a plan costs when it is placed what the search says, through its text as well
            placement = job.place(Plan.parse(best.plan.to_yaml()))
            assert seconds_of(job, placement, costs) == pytest.approx(best.seconds, rel=1e-12)
            simpler += best.seconds > least * (1 + 1e-9)
    assert simpler or not options, "no case in which the tolerance matters"


def test_of_plans_that_are_about_as_fast_the_simplest_comes_first() -> None:
    near = search(workload(nets.Chain(), 16), 4, COSTS, tolerance=0.3)
    assert near.best.redistributions == 0 < near.candidates[1].redistributions
    assert near.best.seconds > near.candidates[1].seconds


def test_the_next_best_strategy_of_a_layer_is_what_the_best_plan_with_it_costs() -> None:
    job = workload(nets.Residual())
    result = search(job, 2, COSTS, within(ONE, FEW), tolerance=0.0)
    every = [(by_layer, seconds_of(job, one, COSTS)) for by_layer, one in every_placement(job, ONE, FEW)]
    best = result.best.strategies
    uses = ("sample",) in best.values()
    for name, other in result.next_best.items():

        def least(strategy: Any, alike: bool, layer: str = name) -> float:
            """Of plans with this strategy of the layer, and among those that use the sample axis as the best does."""
            pairs = ((by_layer, s) for by_layer, s in every if by_layer[layer] == strategy)
            found = (s for by_layer, s in pairs if not alike or (("sample",) in by_layer.values()) == uses)
            return min(found, default=1.0)

        seconds = result.best.seconds + other.extra_s
        assert least(best[name], True) == pytest.approx(result.best.seconds)
        # a plan that uses the sample axis no more is one of another way, and costs less there
        assert least(other.strategy, False) * (1 - 1e-9) <= seconds <= least(other.strategy, True) * (1 + 1e-9)


def test_a_limit_of_memory_is_kept_at_the_least_cost() -> None:
    job = workload(nets.Chain(), 64)
    free = search(job, 2, COSTS, within(ONE, FEW), tolerance=0.0)
    placements = [placement for _, placement in every_placement(job, ONE, FEW)]
    every = [(most(rank_memory(one, COSTS)).total, seconds_of(job, one, COSTS)) for one in placements]
    needed = sorted({memory for memory, _ in every})
    for limit in (needed[0], needed[len(needed) // 3], free.best.memory):
        result = search(job, 2, COSTS, within(ONE, FEW, memory_limit=limit))
        best = min(seconds for memory, seconds in every if memory <= limit)
        assert all(candidate.memory <= limit for candidate in result.candidates)
        assert best * (1 - 1e-12) <= result.best.seconds <= best * (1 + 1e-9 if result.exact else 1.5)
    assert result.exact
    with pytest.raises(ConvoyError, match=r"no plan fits: the smallest needs .* on a device .*; layer .* takes most"):
        search(workload(nets.Chain(), 1, 8), 2, COSTS, Constraints(memory_limit=1000))


def test_layers_that_are_fixed_keep_their_strategy_and_the_others_are_chosen_for_it() -> None:
    job = workload(nets.Residual())
    result = search(job, 2, COSTS, within(ONE, FEW, fixes=("block*=height",)), tolerance=0.0)
    blocks = {"block1.0": [("height",)], "block2.0": [("height",)]}
    least = min(seconds_of(job, one, COSTS) for _, one in every_placement(job, ONE, FEW, blocks))
    assert result.best.seconds == pytest.approx(least, rel=1e-12)
    for net, devices, fixes, strategies in (
        # the first counts
        (nets.Residual, 2, ["block1.*=filter", "*=sample"], {"block1.0": ("filter",), "stem": ("sample",)}),
        (nets.Chain, 4, ["fc=sample,filter"], {"fc": ("sample", "filter")}),  # one for each axis
        (partial(nets.Branches, 6), 2, ["ways.0=channel", "ways.1=sample"], {"ways.0": ("channel",)}),
        (nets.Chain, 2, ["*=owt"], {"fc": ("filter",), "features.0": ("sample",)}),
    ):
        plan = search(workload(net()), devices, COSTS, Constraints(tuple(fixes))).best.plan
        for layer, strategy in strategies.items():
            assert plan.strategy(layer, "linear" if layer == "fc" else "conv") == strategy
    for fixes, words in (
        (["fc=sample,filter,height"], "no mesh that was searched has as many axes"),
        (["features.0=channel", "fc=sample"], r"features\.0.* has only 3 input channels for the 4 ranks"),
    ):
        with pytest.raises(ConvoyError, match=words):
            search(workload(nets.Chain()), 4, COSTS, within(Mesh(("gpu",), (4,)), fixes=tuple(fixes)))
