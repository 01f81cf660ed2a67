"""Networks that fail: on one rank, in the backward pass, or with numbers that are not finite for some pictures."""

import os
import time
from typing import Any, Self

import torch
from torch import Tensor, nn

from convoy.errors import ConvoyError
from tiny import TinyNet


class Mistaken(TinyNet):
    """Raises a mistake of the user on rank 1 before its first training pass."""

    def train(self, mode: bool = True) -> Self:
        if os.environ.get("RANK") == "1":
            time.sleep(1)  # the others wait for it by now
            raise ConvoyError("rank 1 finds the data wanting: mend it")
        return super().train(mode)


class _Undetermined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("guess_backward_cuda does not have a deterministic implementation, but you set 'torch.use…'")


class Undetermined(TinyNet):
    """Has a backward pass such as torch refuses where it is to be deterministic."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(_Undetermined.apply(x.requires_grad_()) if self.training else x)


BAND = 0.4462, 0.458  # between these are the means of a few pictures in a thousand, normalized


class _Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((2, 3), keepdim=True)
        return x + 0 * torch.sqrt((mean - BAND[0]) * (mean - BAND[1])) if self.training else x


class Unfinite(TinyNet):
    """Takes the square root of what is negative for these pictures first."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__(num_classes, in_channels)
        self.odd = _Odd()

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.odd(x))
