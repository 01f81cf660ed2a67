"""What ranks really send is what the plan says, to the byte."""

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import convoy
from convoy.comm import collectives
from convoy.comm.shared_memory import SWITCH
from convoy.engine.network import network_of
from convoy.plans.layout import balanced
from convoy.plans.plan import Plan
from convoy.plans.traffic import all_reduce_elements, cut_traffic, gradient_traffic, transfer_traffic
from plans.made_graph import same_net
from ranks import run_ranks

SAMPLES = 12


def counting(patch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of the tensors that this process gives to torch's collectives; whole numbers (sizes) do not count."""
    os.environ[SWITCH] = "0"
    patch.setattr(collectives, "_SMALL", 0)
    numbers, functions = list[int](), {"all_reduce": dist.all_reduce, "isend": dist.isend}

    def counted(name: str, x: Tensor, *args: Any, group: Any = None, **options: Any) -> Any:
        elements = all_reduce_elements(x.numel(), dist.get_world_size(group)) if name == "all_reduce" else x.numel()
        numbers.append(elements * x.dtype.itemsize * x.is_floating_point())
        return functions[name](x, *args, group=group, **options)

    for name in functions:
        patch.setattr(dist, name, partial(counted, name))
    return numbers


def sent(plan: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes of this rank in the forward pass and in the backward pass of a second update, and what is said of both."""
    torch.manual_seed(0)
    rank, images = dist.get_rank(), torch.randn(SAMPLES, 3, 16, 16)
    with pytest.MonkeyPatch.context() as patch:
        numbers = counting(patch)
        net = convoy.parallelize(same_net(), plan, example=images[:2])
        mine = images[convoy.local_samples(net, SAMPLES)]
        for _ in range(2):
            numbers.clear()
            output = net(mine)
            forward = sum(numbers)
            output.square().sum().backward()
            backward = sum(numbers) - forward
    network = network_of(net)
    parts = tuple(len(part) for part in balanced(SAMPLES, network.num_sample_ranks))
    placement = network.example_placement(True, parts)
    staged = network.staged(placement)
    crossed = cut_traffic(placement, staged) if staged is not None else []
    part = placement if staged is None else staged.part(placement, placement.mesh.stage_of(rank))
    traffic = [each.ranks[rank] for each in (*transfer_traffic(part), *crossed)]
    gradients = sum(numbers[rank] for numbers in gradient_traffic(part).values())
    said = sum(each.forward for each in traffic), sum(each.backward for each in traffic) + gradients
    return (forward, backward), said


MIXED = {
    "mesh": {"node": 2, "gpu": 2},
    "layers": {
        "0": {"node": "sample", "gpu": "height"},
        "2": {"node": "height", "gpu": "filter"},
        "*": {"node": "filter", "gpu": "channel"},
    },
}
PLANS = ["filter=2", "channel=2", "height=3", "owt=3", "sample=2,filter=2"]
STAGED = ["stage=3", "stage=2,filter=2"]


def test_ranks_send_the_bytes_that_the_plan_says() -> None:
    for plan in (*PLANS, *STAGED, MIXED):
        ranks = run_ranks(sent, Plan.parse(plan).mesh.num_devices, plan)
        for (forward, backward), (forward_said, backward_said) in ranks:
            assert forward == pytest.approx(forward_said, abs=64 if plan in STAGED else 0), plan
            assert backward == pytest.approx(backward_said, abs=64), plan
        assert plan not in STAGED or (ranks[0][0][0] > 0 and ranks[-1][0][1] > 0)
