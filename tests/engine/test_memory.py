"""What autograd keeps on every rank is what the plan says."""

import pytest
import torch
import torch.distributed as dist

import convoy
from convoy.engine.network import network_of
from convoy.models import create
from convoy.ops.memory import predict_memory
from convoy.plans.layout import balanced
from kept import kept_bytes
from plans.made_graph import same_net
from ranks import run_ranks

SAMPLES = 4


def _kept(name, size, plan):
    """Bytes that autograd keeps on this rank, parameters that it has, and what was said of both."""
    torch.manual_seed(0)
    model = same_net() if name == "small" else create(name)
    images = torch.randn(SAMPLES, 1 if name == "lenet" else 3, size, size)
    net = convoy.parallelize(model, plan, example=images[:1])
    mine = images[convoy.local_samples(net, SAMPLES)].clone()
    measured = kept_bytes(net, mine)
    network = network_of(net)
    parts = tuple(len(part) for part in balanced(SAMPLES, network.num_sample_ranks))
    said = predict_memory(network.placement([mine], parts, True))[dist.get_rank()]
    parameters = sum(parameter.numel() * parameter.itemsize for parameter in net.parameters())
    return (measured, parameters), (said.activations, said.parameters)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "plan"),
    [
        ("small", 16, "sample=2,filter=2"),
        ("small", 16, "width=2"),
        ("alexnet", 96, "owt=2"),
        ("squeezenet1_1", 64, "height=2"),
        ("resnet18", 64, "filter=2"),
    ],
)
def test_memory(name, size, plan):
    world = 4 if "," in plan else 2
    for (measured, parameters), (said, said_parameters) in run_ranks(_kept, world, name, size, plan):
        assert parameters == said_parameters
        assert said == pytest.approx(measured, rel=0.02), "the statistics of batch norm are not counted"
