"""What ranks really send is what the plan says, to the byte."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import convoy
from convoy.comm import collectives
from convoy.comm.shared_memory import SWITCH
from convoy.engine.network import Network, network_of
from convoy.plans.layout import balanced
from convoy.plans.plan import Plan
from convoy.plans.traffic import all_reduce_elements, cut_traffic, gradient_traffic, transfer_traffic
from plans.made_graph import same_net
from ranks import run_ranks

SAMPLES = 12


class Counter:
    """Adds up the bytes that this process gives to torch's collectives; whole numbers (sizes) are not counted."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        os.environ[SWITCH] = "0"
        self.sent = 0
        patch.setattr(collectives, "_SMALL", 0)

        def counting(function: Any, count: Any) -> Any:
            def counted(x: Tensor, *args: Any, group: Any = None, **options: Any) -> Any:
                if x.is_floating_point():
                    self.sent += count(group, x) * x.dtype.itemsize
                return function(x, *args, group=group, **options)

            return counted

        def reduced(group: Any, x: Tensor) -> int:
            return all_reduce_elements(x.numel(), dist.get_world_size(group))

        patch.setattr(dist, "all_reduce", counting(dist.all_reduce, reduced))
        patch.setattr(dist, "isend", counting(dist.isend, lambda group, x: x.numel()))

    def take(self) -> int:
        sent, self.sent = self.sent, 0
        return sent


def parts_of(network: Network, samples: int) -> tuple[int, ...]:
    return tuple(len(part) for part in balanced(samples, network.num_sample_ranks))


def sent(plan: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes of this rank in the forward pass and in the backward pass of a second update, and what is said of both."""
    torch.manual_seed(0)
    rank, images = dist.get_rank(), torch.randn(SAMPLES, 3, 16, 16)
    with pytest.MonkeyPatch.context() as patch:
        counter = Counter(patch)
        net = convoy.parallelize(same_net(), plan, example=images[:2])
        mine = images[convoy.local_samples(net, SAMPLES)]
        for _ in range(2):
            counter.take()
            output = net(mine)
            forward = counter.take()
            output.square().sum().backward()
            backward = counter.take()
    network = network_of(net)
    placement = network.example_placement(True, parts_of(network, SAMPLES))
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


@pytest.mark.slow
def test_ranks_send_the_bytes_that_the_plan_says() -> None:
    for plan in (*PLANS, *STAGED, MIXED):
        ranks = run_ranks(sent, Plan.parse(plan).mesh.num_devices, plan)
        for (forward, backward), (forward_said, backward_said) in ranks:
            assert forward == pytest.approx(forward_said, abs=64 if plan in STAGED else 0), plan
            assert backward == pytest.approx(backward_said, abs=64), plan
        assert plan not in STAGED or (ranks[0][0][0] > 0 and ranks[-1][0][1] > 0)
