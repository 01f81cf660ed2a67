"""Under autocast a plan is as precise as one device, also where ranks have no samples."""

import pytest
import torch
from low_precision import is_close

from ranks import run_ranks


@pytest.mark.parametrize(
    ("net", "plan", "samples"),
    [("squeeze-excite", "height=2", 8), ("permuted", "channel=2", 8), ("squeeze-excite", "sample=3", 2)],
)
def test_low_precision_under_a_plan(net: str, plan: str, samples: int) -> None:
    assert not any(run_ranks(is_close, int(plan[-1]), net, plan, torch.bfloat16, 16, "cpu", samples))
