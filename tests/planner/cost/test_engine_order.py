"""The messages that are predicted are those that the engine sends: same gradients, same order, on real processes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.engine.network import network_of
from convoy.planner.cost.costs import Costs
from convoy.planner.cost.gradients import Update, exchange
from convoy.planner.cost.program import program
from convoy.planner.cost.times import Roofline
from ranks import run_ranks

PLANS = ("sample=2", "owt=2", "height=2")


class Net(nn.Module):
    """Large and small gradients, defined in another order than they are used in."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(512, 300)
        self.wide = nn.Linear(8 * 16, 512)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.middle = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        x = F.relu(x + self.conv2(x))
        x = F.relu(self.wide(F.adaptive_avg_pool2d(x, 4).flatten(1)))
        return self.head(F.relu(self.middle(x)))


def messages(plan, in_order):
    """What the engine sends after it has seen a backward pass, and what is predicted, as names of parameters."""
    model = Net()
    images = torch.randn(4, 3, 8, 8)
    net = convoy.parallelize(model, plan, example=images)
    network = network_of(net)
    for _ in range(2):
        net.zero_grad()
        net(images).square().mean().backward()
    assert network.reducer is not None
    names = {parameter: name for name, parameter in net.named_parameters()}
    order = [names[parameter] for parameter in network.reducer.parameters]
    found = [
        ([order[member] for member in bucket.members], len(bucket.tally), bucket.alone)
        for bucket in network.reducer.buckets
    ]
    placement = network.example_placement(True)
    ready = [name for item in reversed(program(placement)) for name in item.parameters]
    ready = ready if in_order else [value.name for value in placement.graph.parameters()]
    costs = Costs(Roofline(1e9, 1e9))
    predicted = exchange(placement, ready, Update(), costs.message_sizes)
    held = {name: parameter.numel() * 4 for name, parameter in net.named_parameters()}
    rank = network.groups.rank
    sizes = [
        (list(message.parameters), (message.bytes[rank] - sum(held[name] for name in message.parameters)) // 4)
        for message in predicted.messages
    ]
    alone = [not any(message.copied) and bool(message.parameters) for message in predicted.messages]
    return found, [(*size, each) for size, each in zip(sizes, alone, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_predicted_messages_are_those_of_the_engine(plan):
    for found, predicted in run_ranks(messages, 2, plan, True):
        assert len(found) > (plan == "sample=2")
        assert [(set(names), tally, alone) for names, tally, alone in found] == [
            (set(names), tally, alone) for names, tally, alone in predicted
        ]


def test_another_order_gives_other_messages():
    """Negative control: the first layers' gradients first."""
    found, predicted = run_ranks(messages, 2, "sample=2", False)[0]
    assert [set(names) for names, _, _ in found] != [set(names) for names, _, _ in predicted]
