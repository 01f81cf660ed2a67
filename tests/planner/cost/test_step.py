"""Tasks of a step, its sum and its memory: against the plan's own counts, against the engine, and by hand."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.engine.network import network_of
from convoy.graph.graph import Graph
from convoy.ops.memory import predict_memory
from convoy.planner.cost import step
from convoy.planner.cost.additive import Additive
from convoy.planner.cost.costs import Costs, HostCost, Roofline, Times, Update
from convoy.planner.cost.link import Curve, Link, Links
from convoy.planner.cost.local_op import LocalOp, local_op
from convoy.planner.cost.prediction import predict, rank_memory
from convoy.planner.cost.program import exchange, internal_messages, program, running_statistics, weights_of
from convoy.planner.cost.step import step_tasks
from convoy.plans.buckets import Sizes
from convoy.plans.place import Placement
from convoy.plans.timeline import Task
from convoy.plans.traffic import all_reduce_elements, gradient_traffic, transfer_traffic
from planner.search.nets import additive_seconds
from plans.made_graph import chain, placed, small_net
from ranks import run_ranks

PLANS = ["sample=3", "owt=2", "sample=2,filter=2", "sample=2,height=2", "channel=2"]
ROOFLINE = Roofline(1e9, 1e9)
ALONE = Sizes(alone=1024, bucket=1 << 20, first=1 << 20)
"""Weights travel alone; the biases, with the count of users, in one message at the end."""
EACH = Sizes(alone=1, bucket=1 << 20, first=1 << 20)


def slope(seconds_per_byte: float) -> Curve:
    return Curve(((0, 0.0), (1, seconds_per_byte)))


def links(all_reduce: float = 1e-9, exchange: float = 1e-9, overlap: bool = False, cpu_share: float = 0.0) -> Links:
    link = Link(slope(all_reduce), slope(exchange), overlap, cpu_share)
    return Links(otherwise=lambda ranks: link)


def summed(overlap: bool = False, share: float = 0.0, sizes: Sizes = EACH, update: Update | None = None) -> Costs:
    """Costs of which the sum is the timeline: messages of equal ranks at the end, each gradient by itself."""
    return Costs(ROOFLINE, links(1e-8, 1e-8, overlap, share), update or Update(1e-10, 1e-6), sizes=sizes)


def layers_only(op: LocalOp) -> Times:
    """One second forward and two backward for whatever multiplies, nothing for all else."""
    return Times(1.0, 2.0) if op.op in ("conv", "linear") and not op.is_empty else Times()


def gradients(tasks: list[Task]) -> list[Task]:
    return [task for task in tasks if task.kind == "gradient" and task.rank == 0 and task.stream != "compute"]


def test_what_is_sent_is_what_the_plan_counts() -> None:
    """An all-reduce of n bytes over k ranks sends 2(k-1)/k·n; everything else is counted in bytes sent already."""
    for plan in PLANS:
        placement = placed(small_net(12), plan)
        mesh, sent, expected = placement.mesh, transfer_traffic(placement), gradient_traffic(placement)
        travelling = exchange(placement, weights_of(placement)[::-1], Costs(ROOFLINE).message_sizes).messages
        assert sorted(name for one in travelling for name in one.parameters) == sorted(expected)
        for rank in range(mesh.num_devices):
            for way in ("forward", "backward"):
                result = 0.0
                for one in (one for item in program(placement) for one in getattr(item, way)):
                    number, group = one.bytes[rank], mesh.size(one.axes)
                    result += all_reduce_elements(number, group) if one.kind == "all_reduce" else number
                count = sum(getattr(each.ranks[rank], way) for each in sent)
                assert result == pytest.approx(count, abs=8), (plan, rank, way)
            shares = [(one, 2 * (mesh.size(one.axes) - 1) / mesh.size(one.axes)) for one in travelling]
            counts = sum(share * 4 for one, share in shares for _ in one.parameters)  # of users
            result = sum(share * one.bytes[rank] for one, share in shares) - counts
            assert result == pytest.approx(sum(numbers[rank] for numbers in expected.values()), abs=8), plan


class Net(nn.Module):
    """Large and small gradients, defined in another order than they are used in, and some that never come."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.head, self.wide = nn.Linear(8, 8), nn.Linear(512, 300), nn.Linear(8 * 16, 512)
        self.conv2, self.conv1 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1)
        self.norm, self.middle = nn.BatchNorm2d(8), nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        x = F.relu(x + self.conv2(x))
        x = F.relu(self.wide(F.adaptive_avg_pool2d(x, 4).flatten(1)))
        return self.head(F.relu(self.middle(x)))


def messages(plan: str) -> tuple[list[Any], ...]:
    """What the engine sends after it has seen a backward pass, what is predicted, and that in another order."""
    images = torch.randn(4, 3, 8, 8)
    net = convoy.parallelize(Net(), plan, example=images)
    network = network_of(net)
    for _ in range(2):
        net.zero_grad()
        net(images).square().mean().backward()
    names = {parameter: name for name, parameter in net.named_parameters()}
    order = [names[parameter] for parameter in network.reducer.parameters]
    result = [({order[member] for member in one.members}, len(one.tally), one.alone) for one in network.reducer.buckets]
    placement = network.example_placement(True)
    held = {name: parameter.numel() * 4 for name, parameter in net.named_parameters()}

    def predicted(ready: list[str]) -> list[Any]:
        found = []
        for one in exchange(placement, ready, Costs(ROOFLINE).message_sizes).messages:
            users = (one.bytes[network.groups.rank] - sum(held[name] for name in one.parameters)) // 4
            found.append((set(one.parameters), users, not any(one.copied) and bool(one.parameters)))
        return found

    backward = [name for item in reversed(program(placement)) for name in item.parameters]
    backward = list(dict.fromkeys([*backward, *weights_of(placement)]))
    return result, predicted(backward), predicted([value.name for value in placement.graph.parameters()])


def test_predicted_messages_are_those_of_the_engine_in_their_order() -> None:
    for plan in ("sample=2", "owt=2"):
        for engine, prediction, control in run_ranks(messages, 2, plan):
            assert engine == prediction
            assert plan == "owt=2" or (len(engine) > 1 and engine != control)  # the first layers' gradients first


ONE = 4 * 64 * 64
BIASES = 3 * 64 * 4 + 6 * 4
THREE = chain((8, 64), a=nn.Linear(64, 64), b=nn.Linear(64, 64), c=nn.Linear(64, 64))


def test_gradients_go_in_the_order_of_the_backward_pass_and_hide_behind_it() -> None:
    """A weight's gradient takes 1.5 of the 2 s of the layer before; that of the first layer is left at the end."""
    placement, biases = placed(THREE, "sample=2"), BIASES * 1.5 / ONE

    def timeline(*link: Any) -> Any:
        return predict(placement, Costs(layers_only, links(*link), sizes=ALONE))

    beside, at_end = timeline(1.5 / ONE, 1, True), timeline(1.5 / ONE)
    assert beside.total == pytest.approx(9 + 1.5 + biases) and at_end.total == pytest.approx(9 + 3 * 1.5 + biases)
    assert beside.exposed() == {"a": pytest.approx(1.5), "c": pytest.approx(biases)}
    assert timeline(1.5 / ONE, 1, True, 1.0).total == pytest.approx(at_end.total)  # which takes all cycles of the cores
    costs = Costs(layers_only, links(1e-6, overlap=True), loss=HostCost(0.25), input=HostCost(0.0, 0.125))
    one, three = (gradients(step_tasks(placement, costs, passes)) for passes in (1, 3))
    assert len(one) == len(three) > 0  # the last pass alone sends them
    kinds = predict(placement, costs, 3).by_kind()
    assert (kinds["around"] + kinds["input"], kinds["forward"]) == pytest.approx((3 * (0.25 + 4 * 0.125), 9))
    copying = Costs(lambda op: Times(float(op.op == "copy")), links(), sizes=Sizes(1 << 30, 1 << 30, 1 << 30))
    assert predict(placement, copying).by_kind()["copy"] == 1.0  # into the one message; nothing out of it
    assert additive_seconds(placement, Additive(copying, THREE)) == pytest.approx(6.0, abs=1e-3)
    evaluated = chain((8, 4, 9, 9), training=False, a=nn.Conv2d(4, 6, 3))  # the forward passes alone
    assert predict(placed(evaluated, "sample=2"), Costs(layers_only, links(), Update(fixed=1.0))).total == 1.0


def test_slower_ranks_are_waited_for_and_one_of_each_sort_stands_for_all() -> None:
    def by_sample(op: LocalOp) -> Times:
        return Times(op.outputs[0].shape[0], 0) if op.op == "linear" else Times()

    message = (8 * 8 + 8) * 4 * 1e-3 + 2 * 4 * 1e-3
    for samples, slowdowns, total in ((5, (), 3), (4, (1.0, 2.0), 4)):
        placement = placed(chain((samples, 8), a=nn.Linear(8, 8)), "sample=2")
        timeline = predict(placement, Costs(by_sample, links(1e-3), slowdowns=slowdowns))
        assert timeline.ranks == (0, 1) and timeline.total == pytest.approx(total + message)
        assert timeline.by_kind(0 if slowdowns else 1)["exposed"] == pytest.approx(total - 2 + message)
    for plan in ("sample=4", "height=4", "sample=3,filter=2"):
        placement, costs = placed(small_net(10), plan), Costs(ROOFLINE, links(overlap=True, cpu_share=0.3))
        few = predict(placement, costs)
        with patch.object(step, "rank_classes", lambda mesh, *_: list(range(mesh.num_devices))):
            every = predict(placement, costs)
        assert len(few.ranks) < len(every.ranks) == placement.mesh.num_devices
        assert few.total == pytest.approx(every.total, rel=1e-9)
        assert all(few.by_kind(rank) == pytest.approx(every.by_kind(rank), rel=1e-9) for rank in few.ranks)


def test_the_sum_is_the_timeline_where_nothing_overlaps() -> None:
    """But for the count of users of 8 gradients; and so it is of what the engine takes."""
    graph, engine = small_net(), replace(summed(), per_parameter=0.125)
    for plan in ("serial", "sample=2", "filter=2", "owt=2", "sample=2,filter=2"):
        placement = placed(graph, plan)
        result = additive_seconds(placement, Additive(summed(), graph))
        exchanges = sum(bool(placement.layouts[value.name].copied) for value in graph.parameters())
        assert result == pytest.approx(predict(placement, summed()).total - 4 * exchanges * 1e-8, rel=1e-9), plan
        more = additive_seconds(placement, Additive(engine, graph)) - result
        assert more == pytest.approx(predict(placement, engine).total - predict(placement, summed()).total)
        assert more == pytest.approx(0.125 * exchanges)


def test_memory_is_that_of_the_plan_with_state_messages_and_what_kernels_hold() -> None:
    for plan in ("serial", "sample=2", "sample=2,filter=2"):
        placement, costs = placed(small_net(), plan), summed(update=Update(state=2.0), sizes=Sizes(1 << 30, 1 << 20, 1))
        for memory, kept in zip(rank_memory(placement, costs), predict_memory(placement), strict=True):
            assert memory.optimizer == 2 * kept.parameters and (memory.messages > 0) == ("sample" in plan)
            assert memory.total == kept.total + memory.optimizer + memory.messages + memory.workspace
    # a convolution on a CPU holds two copies of its weight, divided as it is; filters of 1 × 1 and linear layers none
    net = chain((4, 8, 6, 6), a=nn.Conv2d(8, 16, 3, padding=1), b=nn.Conv2d(16, 64, 1))
    for plan, held in (("serial", 2 * 16 * 8 * 9 * 4), ("filter=2", 16 * 8 * 9 * 4)):
        assert rank_memory(placed(net, plan), summed())[0].workspace == held


def call_of(graph: Graph, plan: str, op: str, **options: Any) -> tuple[Placement, Any, Any]:
    """A placement, its call of a kind, and what that sends inside."""
    placement = placed(graph, plan)
    call = next(one for one in placement.calls if one.call.op == op)
    operation = local_op(call, placement, 0, **options)
    mode = [options["batch_norm"]] if "batch_norm" in options else []
    return placement, operation, internal_messages(call, placement.graph, placement.mesh, operation, *mode)


def test_what_calls_send_inside_holds_up_the_step_and_counts_in_the_sum() -> None:
    net = chain((8, 3, 9, 9), c=nn.Conv2d(3, 6, 3), n=nn.BatchNorm2d(6), r=nn.ReLU())
    _, operation, result = call_of(net, "sample=4", "batch_norm")
    assert (operation.option("ranks"), result.axes) == (4, (0,))
    assert result.forward == (("exchange", 3 * 2 * 6 * 4),) and result.backward == (("all_reduce", 2 * 6 * 4),)
    assert call_of(net, "filter=2", "batch_norm")[2].axes == ()
    _, operation, result = call_of(net, "sample=2", "batch_norm", batch_norm="microbatch", microbatch=2)
    assert (operation.option("ranks"), operation.option("parts"), result.axes) == (1, 2, ())
    assert call_of(net, "height=2", "batch_norm", batch_norm="microbatch")[2].axes == (0,)
    placement, costs = placed(net, "sample=2"), Costs(ROOFLINE, links(1e-6, 1e-6))
    local = replace(costs, batch_norm="local")
    exposed, without = predict(placement, costs).exposed(), predict(placement, local).exposed()
    assert exposed["n"] - without.get("n", 0.0) == pytest.approx(2 * (2 * 6 * 4) * 1e-6)
    sums = [additive_seconds(placement, Additive(one, net)) for one in (costs, local)]
    assert sums[0] - sums[1] == pytest.approx(2 * (2 * 6 * 4) * 1e-6, rel=0.2)
    # running statistics travel once in an update
    assert running_statistics(placement, "sync") == []
    assert [one.bytes for one in running_statistics(placement, "local")] == [(2 * 6 * 4,) * 2]
    tasks = step_tasks(placement, replace(costs, batch_norm="microbatch", microbatch=2), passes=3)
    assert [task.num_bytes for task in tasks if task.name == "running statistics"] == [2 * 6 * 4]
