"""Whether several microbatches may run in one pass is seen in a network, which stays as it was."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.engine.coupling import probe
from plans.made_graph import Does

CPU = torch.device("cpu")
BETWEEN: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "nothing": (lambda x: x, True),
    "dropout": (lambda x: F.dropout(x, 0.1, True), True),
    "a mean over samples": (lambda x: x - x.mean(0, keepdim=True), False),
    "no rule, along rows": (lambda x: torch.fft.fft(x, dim=-1).real, True),
    "no rule, along samples": (lambda x: torch.fft.fft(x, dim=0).real, False),
    "draws of its own": (lambda x: x + torch.randn_like(x), False),
}
"""What is done between two layers, and whether each sample still has what it has by itself."""


@pytest.mark.parametrize("kind", BETWEEN)
def test_microbatches_are_merged_where_that_changes_nothing(kind: str) -> None:
    between, apart = BETWEEN[kind]
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
    model = nn.Sequential(first, Does(between), nn.Dropout(0.3), nn.Flatten(), nn.Linear(6 * 8 * 8, 4)).eval()
    before, state = {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.get_rng_state()
    assert (probe(model, (3, 8, 8), CPU).merge((32,) * 4, CPU, 2.0**40) == 4) == apart
    assert not model.training and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
