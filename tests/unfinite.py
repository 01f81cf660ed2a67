"""A network whose numbers are not finite for some pictures, for tests of what is done about that."""

import torch
from torch import Tensor, nn

from tiny import TinyNet

BAND = 0.4462, 0.458
"""Between these are the means of a few pictures in a thousand, normalized."""


class Odd(nn.Module):
    """Takes the square root of what is negative for these pictures."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((2, 3), keepdim=True)
        return x + 0 * torch.sqrt((mean - BAND[0]) * (mean - BAND[1])) if self.training else x


class Unfinite(TinyNet):
    """Has such a layer in front."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__(num_classes, in_channels)
        self.odd = Odd()

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return super().forward(self.odd(x))
