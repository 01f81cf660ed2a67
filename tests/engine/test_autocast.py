"""Under autocast a plan is as precise as one device, whether or not the network first runs in its context."""

import pytest
import torch
from low_precision import closeness

from ranks import run_ranks


def check(net: str, plan: str, world: int, samples: int = 8) -> None:
    for found in run_ranks(closeness, world, net, plan, torch.bfloat16, 16, "cpu", samples):
        assert found.dtype == torch.bfloat16
        assert found.ok, found


@pytest.mark.parametrize("plan", ["sample=2", "filter=2", "channel=2", "height=2"])
@pytest.mark.parametrize("net", ["squeeze-excite", "permuted"])
def test_low_precision_under_a_plan(net: str, plan: str) -> None:
    check(net, plan, 2)


@pytest.mark.parametrize("net", ["squeeze-excite", "shuffle"])
def test_ranks_without_samples_send_the_same_type(net: str) -> None:
    check(net, "sample=3", 3, samples=2)
