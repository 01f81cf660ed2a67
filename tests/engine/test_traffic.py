"""What the ranks really send is what the plan says, to the byte."""

import math
import os

import pytest
import torch
import torch.distributed as dist

import convoy
from convoy.comm import collectives
from convoy.comm.shared_memory import SWITCH
from convoy.engine.network import network_of
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
        for owner, name, count in [
            (dist, "all_reduce", self._all_reduce),
            (dist, "isend", self._send),
        ]:
            patch.setattr(owner, name, self._counting(getattr(owner, name), count))

    def take(self) -> int:
        sent, self.sent = self.sent, 0
        return sent

    def _counting(self, function, count):
        def counted(*args, group=None, **kwargs):
            if args[0].is_floating_point():
                self.sent += count(group, *args) * args[0].dtype.itemsize
            return function(*args, group=group, **kwargs)

        return counted

    def _all_reduce(self, group, x, *rest):
        return all_reduce_elements(x.numel(), dist.get_world_size(group))

    def _send(self, group, x):
        return x.numel()


def _sent(plan, steps=2):
    """Bytes of this rank in the forward pass, in the backward pass, and what was said of both."""
    with pytest.MonkeyPatch.context() as patch:
        return _counted(plan, steps, Counter(patch))


def _counted(plan, steps, counter):
    torch.manual_seed(0)
    rank = dist.get_rank()
    images = torch.randn(SAMPLES, 3, 16, 16)
    net = convoy.parallelize(same_net(), plan, example=images[:2])
    mine = images[convoy.local_samples(net, SAMPLES)]
    for _ in range(steps):
        counter.take()
        output = net(mine)
        forward = counter.take()
        output.square().sum().backward()
        backward = counter.take()
    network = network_of(net)
    samples = [len(part) for part in network.placement([mine], _shares(network), True).batch.parts]
    assert sum(samples) == SAMPLES
    placement = network.placement([mine], tuple(samples), True)
    staged = network.staged(placement)
    crossed = cut_traffic(placement, staged) if staged is not None else []
    part = placement if staged is None else staged.part(placement, placement.mesh.stage_of(rank))
    traffic = [each.ranks[rank] for each in (*transfer_traffic(part), *crossed)]
    gradients = sum(numbers[rank] for numbers in gradient_traffic(part).values())
    said = sum(each.forward for each in traffic), sum(each.backward for each in traffic) + gradients
    return (forward, backward), said


def _shares(network):
    ranks = network.num_sample_ranks
    return tuple(SAMPLES // ranks + (rank < SAMPLES % ranks) for rank in range(ranks))


MIXED = {
    "mesh": {"node": 2, "gpu": 2},
    "layers": {
        "0": {"node": "sample", "gpu": "height"},
        "2": {"node": "height", "gpu": "filter"},
        "*": {"node": "filter", "gpu": "channel"},
    },
}


PLANS = ["sample=3", "filter=2", "channel=2", "height=3", "width=2", "owt=3", "sample=2,filter=2", "height=2,width=2"]
STAGED = ["stage=3", "stage=2,sample=2", "stage=2,filter=2"]


@pytest.mark.parametrize("plan", [*PLANS, *STAGED, MIXED], ids=[*PLANS, *STAGED, "mixed"])
def test_ranks_send_the_bytes_that_the_plan_says(plan):
    sent = run_ranks(_sent, math.prod(Plan.parse(plan).mesh.sizes), plan)
    for (forward, backward), (forward_said, backward_said) in sent:
        assert forward == pytest.approx(forward_said, abs=64 if plan in STAGED else 0)
        assert backward == pytest.approx(backward_said, abs=64)
    assert plan not in STAGED or (sent[0][0][0] > 0 and sent[-1][0][1] > 0)
