"""Under autocast a plan is as precise as one device, also where ranks have no samples."""

import pytest
import torch
from low_precision import closeness
from own_loops import world_of

from ranks import run_ranks


@pytest.mark.parametrize(
    ("net", "plan", "samples"),
    [
        ("squeeze-excite", "height=2", 8),
        ("permuted", "channel=2", 8),
        ("squeeze-excite", "sample=3", 2),
    ],
)
def test_low_precision_under_a_plan(net: str, plan: str, samples: int) -> None:
    world = 3 if plan == "sample=3" else world_of(plan)
    for found in run_ranks(closeness, world, net, plan, torch.bfloat16, 16, "cpu", samples):
        assert found.dtype == torch.bfloat16
        assert found.ok, found
