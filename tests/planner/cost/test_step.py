"""Tasks of a step against the plan's own counts, and timelines of small networks by hand."""

import pytest

from convoy.planner.cost.costs import Costs, HostCost
from convoy.planner.cost.gradients import Update
from convoy.planner.cost.link import Curve, Link, Links
from convoy.planner.cost.memory import gradient_exchange
from convoy.planner.cost.prediction import predict
from convoy.planner.cost.program import program
from convoy.planner.cost.step import step_tasks
from convoy.planner.cost.times import Roofline, Times
from convoy.plans.buckets import Sizes
from convoy.plans.traffic import all_reduce_elements, gradient_traffic, transfer_traffic
from plans.made_graph import Chain, placed, small_net

PLANS = ["sample=2", "filter=2", "owt=2", "height=2", "sample=2,filter=2", "sample=3", "sample=2,height=2", "channel=2"]
ROOFLINE = Roofline(1e9, 1e9)


def slope(seconds_per_byte):
    return Curve(((0, 0.0), (1, seconds_per_byte)))


def links(all_reduce=1e-9, exchange=1e-9, overlap=False, cpu_share=0.0):
    link = Link(slope(all_reduce), slope(exchange), overlap, cpu_share)
    return Links(otherwise=lambda ranks: link)


def layers_only(local_op):
    """One second forward and two backward for whatever multiplies, nothing for all else."""
    return Times(1.0, 2.0) if local_op.op in ("conv", "linear") and not local_op.is_empty else Times()


def messages(tasks, kind, rank=0):
    return [task for task in tasks if task.kind == kind and task.rank == rank and task.stream != "compute"]


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_sent_is_what_the_plan_counts(plan):
    """An all-reduce of n bytes over k ranks sends 2(k-1)/k·n; everything else is counted in bytes sent already."""
    placement = placed(small_net(12), plan)
    mesh = placement.mesh
    for rank in range(mesh.num_devices):
        found = {"forward": 0, "backward": 0}
        for item in program(placement):
            for way in found:
                for message in getattr(item, way):
                    size = message.bytes[rank]
                    count = mesh.size(message.axes)
                    found[way] += all_reduce_elements(size, count) if message.kind == "all_reduce" else size
        sent = transfer_traffic(placement)
        assert found["forward"] == pytest.approx(sum(each.ranks[rank].forward for each in sent), abs=8), plan
        assert found["backward"] == pytest.approx(sum(each.ranks[rank].backward for each in sent), abs=8), plan


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_sent_are_what_the_plan_counts_and_the_count_of_users(plan):
    placement = placed(small_net(12), plan)
    mesh, expected = placement.mesh, gradient_traffic(placement)
    found = gradient_exchange(placement, Costs(ROOFLINE, links())).messages
    assert sorted(name for message in found for name in message.parameters) == sorted(expected)
    for rank in range(mesh.num_devices):
        sent = 0.0
        for message in found:
            count = mesh.size(message.axes)
            sent += 2 * (count - 1) / count * message.bytes[rank]
        counts = sum(2 * (mesh.size(m.axes) - 1) / mesh.size(m.axes) * 4 for m in found for _ in m.parameters)
        assert sent - counts == pytest.approx(sum(numbers[rank] for numbers in expected.values()), abs=8)


def test_a_message_more_would_show():
    """Negative control of the two tests above."""
    placement = placed(small_net(12), "filter=2")
    sent = sum(each.ranks[0].forward for each in transfer_traffic(placement))
    items = program(placement)
    counted = [message.bytes[0] for item in items for message in item.forward]
    assert sum(counted) == sent != sum(counted[:-1])


def test_one_device_is_the_sum_of_its_layers():
    timeline = predict(placed(small_net(), "serial"), Costs(layers_only, update=Update(fixed=0.5)))
    assert timeline.total == 4 + 8 + 0.5
    assert timeline.by_kind() == {"forward": 4, "backward": 8, "update": 0.5, "exposed": 0, "idle": 0}


def test_transfers_hold_up_what_comes_after_them():
    """Two linear layers by filter: the input needs no gradient, the features travel once each way, and so does the
    output, whose gradient every rank has whole already."""
    graph = Chain(8, 16).linear("a", 32).relu("r").linear("b", 12).graph()
    placement = placed(graph, "filter=2")
    timeline = predict(placement, Costs(layers_only, links(exchange=1e-3)))
    half = 8 * 32 // 2 * 4
    output = 8 * 12 // 2 * 4
    assert timeline.exposed() == {"b": pytest.approx(2 * half * 1e-3), "": pytest.approx(output * 1e-3)}
    assert timeline.total == pytest.approx(6 + sum(timeline.exposed().values()))


def net():
    """Three layers with parameters of 4·(64·64 + 64) bytes each."""
    return Chain(8, 64).linear("a", 64).linear("b", 64).linear("c", 64).graph()


ONE = 4 * 64 * 64
ALONE = Sizes(alone=1024, bucket=1 << 20, first=1 << 20)
"""Weights travel alone; the biases, with the count of users, in one message at the end."""


def test_gradients_hide_behind_the_backward_pass():
    """A weight's gradient takes 1.5 of the 2 s of the layer before; that of the first layer is left at the end."""
    costs = Costs(layers_only, links(all_reduce=1.5 / ONE, overlap=True), sizes=ALONE)
    timeline = predict(placed(net(), "sample=2"), costs)
    biases = (3 * 64 * 4 + 6 * 4) * 1.5 / ONE
    assert timeline.total == pytest.approx(3 + 6 + 1.5 + biases)
    assert timeline.exposed() == {"a": pytest.approx(1.5), "c": pytest.approx(biases)}


def test_through_shared_memory_gradients_come_at_the_end():
    costs = Costs(layers_only, links(all_reduce=1.5 / ONE), sizes=ALONE)
    timeline = predict(placed(net(), "sample=2"), costs)
    biases = (3 * 64 * 4 + 6 * 4) * 1.5 / ONE
    assert timeline.total == pytest.approx(3 + 6 + 3 * 1.5 + biases)


def test_messages_that_take_the_core_are_as_slow_as_those_at_the_end():
    at_end = predict(placed(net(), "sample=2"), Costs(layers_only, links(1 / ONE), sizes=ALONE))
    beside = predict(placed(net(), "sample=2"), Costs(layers_only, links(1 / ONE, 1, True, 1.0), sizes=ALONE))
    assert beside.total == pytest.approx(at_end.total)
    half = predict(placed(net(), "sample=2"), Costs(layers_only, links(1 / ONE, 1, True, 0.5), sizes=ALONE))
    assert 9 < half.total < at_end.total


def test_messages_go_in_the_order_of_the_backward_pass():
    tasks = step_tasks(placed(net(), "sample=2"), Costs(layers_only, links(overlap=True), sizes=ALONE))
    sent = messages(tasks, "gradient")
    assert [task.name for task in sent] == ["c.weight", "b.weight", "a.weight", "c.bias and 2 more"]
    assert [task.num_bytes for task in sent] == [ONE, ONE, ONE, 3 * 64 * 4 + 6 * 4]


def test_only_the_last_pass_sends_gradients():
    placement = placed(net(), "sample=2")
    costs = Costs(layers_only, links(1e-6, overlap=True), loss=HostCost(0.25), input=HostCost(0.0, 0.125))
    one, three = (step_tasks(placement, costs, passes) for passes in (1, 3))
    assert len(messages(one, "gradient")) == len(messages(three, "gradient")) > 0
    assert predict(placement, costs, 3).by_kind()["around"] == pytest.approx(3 * (0.25 + 4 * 0.125))
    assert predict(placement, costs, 3).by_kind()["forward"] == pytest.approx(9)


def test_ranks_with_more_samples_are_waited_for():
    def by_sample(local_op):
        return Times(local_op.outputs[0].shape[0], 0) if local_op.op == "linear" else Times()

    timeline = predict(placed(Chain(5, 8).linear("a", 8).graph(), "sample=2"), Costs(by_sample, links(1e-3)))
    assert timeline.ranks == (0, 1)
    assert timeline.busiest == 0
    message = (8 * 8 + 8) * 4 * 1e-3 + 2 * 4 * 1e-3
    assert timeline.total == pytest.approx(3 + message)
    assert timeline.by_kind(1)["exposed"] == pytest.approx(1 + message)


@pytest.mark.parametrize("plan", ["sample=4", "sample=2,filter=2", "height=4", "sample=3,filter=2"])
def test_one_rank_of_each_sort_stands_for_all(plan):
    placement = placed(small_net(10), plan)
    costs = Costs(ROOFLINE, links(overlap=True, cpu_share=0.3))
    few, every = predict(placement, costs), predict(placement, costs, every_rank=True)
    assert len(few.ranks) < len(every.ranks) == placement.mesh.num_devices
    assert few.total == pytest.approx(every.total, rel=1e-9)
    for rank in few.ranks:
        assert few.by_kind(rank) == pytest.approx(every.by_kind(rank), rel=1e-9)


def test_large_updates_are_divided_where_that_is_worth_it():
    graph = Chain(2, 4096).linear("a", 4200).graph()
    placement = placed(graph, "sample=2")
    weight = 4096 * 4200 * 4
    divided = Costs(layers_only, links(), Update(1e-9, divisible=True))
    whole = Costs(layers_only, links(), Update(1e-9))
    sent = messages(step_tasks(placement, divided), "gradient")
    assert [task.num_bytes for task in sent if task.num_bytes > 1e6] == [weight // 2, weight // 2]
    assert predict(placement, divided).by_kind()["update"] == pytest.approx((weight // 2 + 4200 * 4) * 1e-9)
    assert predict(placement, whole).by_kind()["update"] == pytest.approx((weight + 4200 * 4) * 1e-9)
    assert max(task.num_bytes for task in messages(step_tasks(placement, whole), "gradient")) == weight


def test_evaluation_has_neither_backward_pass_nor_update():
    graph = Chain(8, 4, 9, 9, training=False).conv("a", 6).graph()
    timeline = predict(placed(graph, "sample=2"), Costs(layers_only, links(), Update(fixed=1.0)))
    assert timeline.total == 1.0


def test_input_that_others_get_ready_is_waited_for_as_far_as_an_update_is_too_short():
    placement = placed(small_net(12), "sample=2")
    without = predict(placement, Costs(layers_only, links()))
    for per_sample, late in ((1e-3, 0.0), (without.total, 5 * without.total)):
        costs = Costs(layers_only, links(), input=HostCost(per_sample=per_sample, beside=True))
        found = predict(placement, costs)
        assert found.total == pytest.approx(without.total + late)
        assert found.by_kind().get("around", 0.0) == pytest.approx(late)
        passes = predict(placement, costs, passes=2)
        assert passes.total == pytest.approx(predict(placement, Costs(layers_only, links()), passes=2).total + 2 * late)
