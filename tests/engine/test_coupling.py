"""What couples the samples of a batch is read off the calls of a network."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convoy.engine.coupling import coupling, probe
from plans.made_graph import Does, chain

COUPLED = {
    "mean": lambda x: x - x.mean(0),
    "amax": lambda x: x - x.amax(0),
    "flip": lambda x: x + x.flip(0),
    "matmul": lambda x: x + (x @ x.t()) @ x,
    "layer_norm": lambda x: F.layer_norm(x, x.shape),
    "group_norm": lambda x: F.group_norm(x.t()[None], 4)[0].t(),
}
APART = lambda x: F.normalize(F.layer_norm(x - x.mean(1, keepdim=True), (4,))).t().contiguous().t()  # noqa: E731


def test_calls_that_compute_with_several_samples_are_known() -> None:
    def result(function: Any) -> Any:
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return coupling(chain((4, 3, 8, 8), conv=nn.Conv2d(3, 4, 3), head=head, between=Does(function)))

    for name, function in COUPLED.items():
        call = result(function)
        assert (call.layer, call.function.__name__) == ("between", name)
    assert not result(APART)


def test_calls_without_a_rule_may_share_weights() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("nchw,cd,->nd", x, self.weight, self.scale)

    assert probe(Mixing(), (3, 4, 4), torch.device("cpu")).separable
