"""Predicted memory against what autograd really keeps."""

import pytest
import torch
from torch import nn

from convoy.graph.graph import Ref
from convoy.graph.tree import leaves
from convoy.models import create
from convoy.ops import capture, place
from convoy.ops.memory import predict_memory
from convoy.plans.place import Batch
from convoy.plans.plan import Plan
from kept import kept_bytes
from plans.made_graph import placed, same_net, small_net


def test_a_small_network_to_the_byte():
    memory = predict_memory(placed(small_net(), "serial"))[0]
    model = same_net()
    assert memory.parameters == memory.gradients == sum(4 * p.numel() for p in model.parameters())
    assert memory.activations == kept_bytes(model, torch.zeros(8, 3, 16, 16))
    assert memory.total == memory.parameters + memory.gradients + memory.activations


def test_rms_norm_keeps_what_it_normalizes_and_what_it_scales():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.RMSNorm((4, 6, 6)))
    plan = Plan.parse("serial")
    graph = capture(model, ((2, 3, 6, 6),))
    memory = predict_memory(place(graph, plan, Batch(plan.mesh, (), (range(2),)), ["1"]))[0]
    roots = 2 * 4  # one number for each vector is left out
    assert memory.activations + roots == kept_bytes(model, torch.zeros(2, 3, 6, 6))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("lenet", 28), ("alexnet", 96), ("squeezenet1_1", 64), ("resnet18", 64)])
def test_known_networks_to_a_few_hundredths(name, size):
    model = create(name)
    images = torch.zeros(2, 1 if name == "lenet" else 3, size, size)
    graph = capture(model, (images,), training=True)
    plan = Plan.parse("serial")
    batch = Batch(plan.mesh, (), (range(2),))
    placement = place(graph, plan, batch, [ref.name for ref in leaves(graph.output, Ref)])
    memory = predict_memory(placement)[0]
    assert memory.parameters == sum(4 * p.numel() for p in model.parameters())
    assert memory.activations == pytest.approx(kept_bytes(model, images), rel=0.03)


def test_more_ranks_hold_less():
    def of(plan):
        return predict_memory(placed(small_net(), plan))

    whole = of("serial")[0]
    by_samples = of("sample=2")
    assert by_samples[0] == by_samples[1]
    assert by_samples[0].parameters == whole.parameters
    assert by_samples[0].activations * 2 == whole.activations
    assert of("sample=3")[0].activations > of("sample=3")[2].activations
    by_filters = of("filter=2")[0]
    assert by_filters.parameters * 2 == whole.parameters
    assert by_filters.gradients == by_filters.parameters
    owt = of("owt=2")[0]
    assert by_filters.parameters < owt.parameters < whole.parameters
    assert owt.activations < by_filters.activations


def test_filters_pay_for_inputs_that_are_gathered():
    by_filters = predict_memory(placed(small_net(), "filter=2"))[0]
    one = predict_memory(placed(small_net(), "serial"))[0]
    assert by_filters.activations > one.activations
