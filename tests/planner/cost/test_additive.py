"""The sum that the search makes least, against the timeline; memory of ranks; ranks that are alike."""

import math
from dataclasses import replace

import pytest

from convoy.ops.memory import predict_memory
from convoy.planner.cost.additive import Additive, busy_ranks, sent_elements, some_places
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.gradients import Update
from convoy.planner.cost.link import Curve, Link, Links
from convoy.planner.cost.memory import rank_memory
from convoy.planner.cost.prediction import predict
from convoy.planner.cost.simulation import rank_classes
from convoy.planner.cost.times import Roofline, Times
from convoy.planner.search.prices import additive_seconds
from convoy.plans.buckets import Sizes
from convoy.plans.mesh import Mesh
from convoy.plans.traffic import needs_gradient, step_elements
from plans.made_graph import Chain, placed, small_net

ALONE = Sizes(alone=1, bucket=1 << 20, first=1 << 20)
CURVE = Curve(((0, 0.0), (1, 1e-8)))


def costs(overlap=False, share=0.0, update=None, sizes=ALONE):
    links = Links(otherwise=lambda ranks: Link(CURVE, CURVE, overlap, share))
    return Costs(Roofline(1e9, 1e9), links, update or Update(1e-10, 1e-6), sizes=sizes)


@pytest.mark.parametrize("plan", ["serial", "sample=2", "filter=2", "owt=2", "sample=2,filter=2", "filter=4"])
def test_the_sum_is_the_timeline_where_nothing_overlaps(plan):
    """Messages at the end, all of equal ranks, each gradient by itself: but for the count of users of 8 gradients."""
    graph = small_net(8)
    placement = placed(graph, plan)
    found = additive_seconds(placement, Additive(costs(), graph))
    counted = sum(4 for value in graph.parameters() if placement.layouts[value.name].copied)
    assert found == pytest.approx(predict(placement, costs()).total - counted * 1e-8, rel=1e-9)


@pytest.mark.parametrize("plan", ["serial", "sample=2", "filter=2", "sample=2,filter=2"])
def test_what_the_engine_takes_counts_in_the_sum_as_in_the_timeline(plan):
    graph = small_net(8)
    placement = placed(graph, plan)
    engine = replace(costs(), per_transfer=Times(0.25, 0.5), per_parameter=0.125)
    more = predict(placement, engine).total - predict(placement, costs()).total
    sums = additive_seconds(placement, Additive(engine, graph)) - additive_seconds(placement, Additive(costs(), graph))
    assert more == pytest.approx(sums)
    steps = [
        0.75 if name in needs_gradient(graph) else 0.25
        for found in (*(call.transfers for call in placement.calls), placement.outputs)
        for name, parts in found.items()
        for _ in parts
    ]
    added = sum(bool(placement.layouts[value.name].copied) for value in graph.parameters())
    assert more == pytest.approx(sum(steps) + 0.125 * added)


def test_what_overlaps_is_less_than_the_sum():
    """Negative control of the test above."""
    graph = small_net(8)
    placement = placed(graph, "sample=2")
    assert predict(placement, costs(overlap=True)).total < 0.999 * additive_seconds(placement, Additive(costs(), graph))


def test_exchanges_beside_the_computation_count_in_part():
    graph = small_net(8)
    placement = placed(graph, "sample=2")
    at_end, beside, taking = (
        additive_seconds(placement, Additive(costs(*how), graph)) for how in ((), (True, 0.0), (True, 1.0))
    )
    assert beside < at_end == pytest.approx(taking)


def test_several_passes_count_all_but_the_update():
    graph = small_net(8)
    placement = placed(graph, "filter=2")
    one, two, three = (additive_seconds(placement, Additive(costs(), graph, passes)) for passes in (1, 2, 3))
    assert two - one == pytest.approx(three - two)
    assert one < 1.0 * two < 2 * one


def test_small_gradients_pay_their_part_of_a_message():
    graph = small_net(8)
    placement = placed(graph, "sample=2")
    sums = additive_seconds(placement, Additive(costs(sizes=Sizes(1 << 30, 1 << 10, 1 << 10)), graph))
    assert sums > additive_seconds(placement, Additive(costs(), graph))  # copies in and out


@pytest.mark.parametrize(
    "plan", ["filter=2", "owt=4", "sample=2,filter=2", "height=4", "sample=2,height=4", "channel=3"]
)
def test_bytes_of_the_sum_are_those_of_the_plan(plan):
    placement = placed(small_net(8), plan)
    mesh = placement.mesh
    steps = [(name, step) for call in placement.calls for name, found in call.transfers.items() for step in found]
    assert steps
    for name, step in steps:
        shape = placement.graph.shape(name)
        every = [step_elements(step, mesh, mesh.coordinates(rank), shape) for rank in range(mesh.num_devices)]
        some = [sent_elements(step, mesh, place, shape) for place in some_places(step, mesh)]
        assert max(each.forward for each in some) == max(each.forward for each in every), step
        assert max(each.backward for each in some) == max(each.backward for each in every), step


def test_the_rank_in_the_middle_has_most_rows():
    placement = placed(Chain(4, 3, 12, 12).conv("a", 4).graph(), "height=3")
    assert busy_ranks(placement.calls[0], placement.mesh) == {0, 1}
    placement = placed(small_net(), "sample=4")
    assert busy_ranks(placement.calls[0], placement.mesh) == {0}


@pytest.mark.parametrize("plan", ["serial", "sample=2", "filter=2", "sample=2,filter=2"])
def test_memory_is_that_of_the_plan_with_state_and_messages(plan):
    placement = placed(small_net(8), plan)
    of_plan = predict_memory(placement)
    found = rank_memory(placement, costs(update=Update(state=2.0), sizes=Sizes(1 << 30, 1 << 20, 1 << 20)))
    for mine, theirs in zip(found, of_plan, strict=True):
        assert mine.optimizer == 2 * theirs.parameters
        assert mine.total == theirs.total + mine.optimizer + mine.messages + mine.workspace
    assert all((memory.messages > 0) == ("sample" in plan) for memory in found)
    summed = Additive(costs(update=Update(state=2.0)), placement.graph).memory(placement)
    most = zip(found, of_plan, strict=True)
    assert summed == pytest.approx(max(b.total + 2 * b.parameters + a.workspace for a, b in most))


def test_a_convolution_on_a_cpu_holds_two_copies_of_its_weight():
    """Its filters divided as they are; filters of 1 × 1 and linear layers hold none, and of GPUs nothing is known."""
    net = Chain(4, 8, 6, 6).conv("a", 16, 3).conv("b", 64, 1).conv("c", 16, 1).flatten().linear("d", 10)
    whole = rank_memory(placed(net.graph(), "serial"), costs())[0]
    assert whole.workspace == 2 * 16 * 8 * 9 * 4
    halves = rank_memory(placed(net.graph(), "filter=2"), costs())
    assert [one.workspace for one in halves] == [whole.workspace / 2] * 2
    on_gpu = rank_memory(placed(net.graph(), "serial"), replace(costs(), on_cpu=False))[0]
    assert on_gpu.total == whole.total - whole.workspace
    only_points = Chain(4, 8, 6, 6).conv("b", 64, 1).graph()
    assert rank_memory(placed(only_points, "serial"), costs())[0].workspace == 0


def test_divided_updates_keep_a_part_of_the_state():
    graph = Chain(2, 4096).linear("a", 4200).graph()
    placement = placed(graph, "sample=2")
    whole, divided = (
        rank_memory(placement, costs(update=Update(state=1.0, divisible=divisible), sizes=Sizes(1 << 18, 1 << 20, 1)))[
            0
        ]
        for divisible in (False, True)
    )
    assert whole.optimizer - divided.optimizer == 4096 * 4200 * 4 // 2
    additive = Additive(costs(update=Update(1e-9, divisible=True)), graph)
    weight = graph.values["a.weight"]
    layout = placement.layouts["a.weight"]
    assert additive.update(weight, layout, placement.mesh) == pytest.approx(math.prod(weight.shape) * 4 / 2 * 1e-9)


def test_ranks_are_alike_if_they_meet_ranks_that_are_alike():
    mesh = Mesh(("a", "b"), (2, 3))
    assert rank_classes(mesh, ["x"] * 6, [(0,), (1,)]) == [0] * 6
    assert rank_classes(mesh, ["y", "x", "x", "x", "x", "x"], []) == [0, 1, 1, 1, 1, 1]
    assert rank_classes(mesh, ["y", "x", "x", "x", "x", "x"], [(1,)]) == [0, 1, 1, 3, 3, 3]
    assert rank_classes(mesh, ["y", "x", "x", "x", "x", "x"], [(0,), (1,)]) == [0, 1, 1, 3, 4, 4]
