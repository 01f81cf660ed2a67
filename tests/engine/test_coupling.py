"""What a probe finds of a network before it trains."""

import torch
from torch import Tensor, nn

from convoy.engine.coupling import probe


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(3, 4), torch.tensor(2.0)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nchw,cd,->nd", x, *self.weights)


def test_calls_without_a_rule_may_share_weights() -> None:
    assert probe(Mixing(), (3, 4, 4), torch.device("cpu")).separable
