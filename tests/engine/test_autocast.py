"""Under autocast a plan is as precise as one device, whether or not the network first runs in its context."""

import pytest
import torch
from low_precision import closeness

from ranks import run_ranks


@pytest.mark.parametrize("plan", ["filter=2", "channel=2", "height=2"])
def test_low_precision_under_a_plan(plan: str) -> None:
    for found in run_ranks(closeness, 2, "squeeze-excite", plan, torch.bfloat16, 16):
        assert found.dtype == torch.bfloat16
        assert found.ok, found
