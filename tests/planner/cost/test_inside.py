"""What normalizations send: statistics inside a call, and running statistics before an update."""

import pytest
import torch
from torch import nn

from convoy.ops import capture, place
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.link import Curve, Link, Links
from convoy.planner.cost.local import local_op
from convoy.planner.cost.prediction import predict
from convoy.planner.cost.program import internal_messages, running_statistics
from convoy.planner.cost.step import step_tasks
from convoy.planner.cost.times import Roofline
from convoy.plans.layout import balanced
from convoy.plans.place import Batch, sample_axes
from convoy.plans.plan import Plan
from plans.made_graph import Chain, placed

CURVE = Curve(((0, 0.0), (1, 1e-6)))
COSTS = Costs(Roofline(1e9, 1e9), Links(otherwise=lambda ranks: Link(CURVE, CURVE)))


def captured(*layers, samples=8):
    return capture(nn.Sequential(*layers), (torch.empty(samples, 3, 9, 9, device="meta"),), training=True)


@pytest.fixture(scope="module")
def normalized():
    return captured(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())


def by_op(graph, plan, op):
    plan = Plan.parse(plan)
    axes = sample_axes(((call.layer, call.op) for call in graph.calls), plan)
    batch = Batch(plan.mesh, axes, balanced(graph.shape(graph.inputs[0])[0], plan.mesh.size(axes)))
    placement = place(graph, plan, batch, [graph.output.name])
    return placement, next(placed for placed in placement.calls if placed.call.op == op)


def test_synchronized_batch_norm_gathers_statistics_and_adds_two_numbers_a_channel(normalized):
    placement, call = by_op(normalized, "sample=4", "batch_norm")
    own = local_op(call, placement, 0)
    assert own.option("ranks") == 4
    found = internal_messages(call, placement.graph, placement.mesh, own)
    assert found.axes == (0,)
    assert found.forward == (("exchange", 3 * 2 * 6 * 4),)
    assert found.backward == (("all_reduce", 2 * 6 * 4),)


def test_divided_channels_and_microbatches_need_no_statistics_of_others(normalized):
    placement, call = by_op(normalized, "filter=2", "batch_norm")
    assert internal_messages(call, placement.graph, placement.mesh, local_op(call, placement, 0)).axes == ()
    placement, call = by_op(normalized, "sample=2", "batch_norm")
    own = local_op(call, placement, 0, batch_norm="microbatch", microbatch=2)
    assert (own.option("ranks"), own.option("parts")) == (1, 2)
    assert internal_messages(call, placement.graph, placement.mesh, own, "microbatch").axes == ()
    placement, call = by_op(normalized, "height=2", "batch_norm")
    assert internal_messages(
        call, placement.graph, placement.mesh, local_op(call, placement, 0), "microbatch"
    ).axes == (0,)


def test_running_statistics_travel_once_in_an_update(normalized):
    placement, _ = by_op(normalized, "sample=2", "batch_norm")
    assert running_statistics(placement, "sync") == []
    for batch_norm in ("microbatch", "local"):
        (message,) = running_statistics(placement, batch_norm)
        assert (message.kind, message.bytes) == ("all_reduce", (2 * 6 * 4,) * 2)
    tasks = step_tasks(placement, Costs(COSTS.times, COSTS.links, batch_norm="microbatch", microbatch=2), passes=3)
    assert [task.num_bytes for task in tasks if task.name == "running statistics"] == [2 * 6 * 4]


def test_softmax_over_divided_classes_sends_three_numbers_a_sample():
    chain = Chain(8, 16).linear("a", 12)
    shape = chain.values[chain.last].shape
    graph = chain.call(
        "s", "softmax", torch.softmax, shape, (chain.last,), {"input": chain.last, "dim": 1, "function": "softmax"}
    ).graph()
    placement = placed(graph, "filter=2")
    call = placement.calls[1]
    found = internal_messages(call, graph, placement.mesh, local_op(call, placement, 0))
    assert found.forward == (("exchange", 8 * 4), ("all_reduce", 8 * 4))
    assert found.backward == (("all_reduce", 8 * 4),)


def test_statistics_hold_up_the_step(normalized):
    placement, _ = by_op(normalized, "sample=2", "batch_norm")
    layer = next(call.call.layer for call in placement.calls if call.call.op == "batch_norm")
    exposed = predict(placement, COSTS).exposed()
    own = predict(placement, Costs(COSTS.times, COSTS.links, batch_norm="local")).exposed()
    assert exposed[layer] - own.get(layer, 0.0) == pytest.approx((2 * 6 * 4 + 2 * 6 * 4) * 1e-6)
