"""Networks that fail on one rank, for tests of what the others do."""

import os
import time
from typing import Any, Self

import torch
from torch import Tensor

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
