"""Functions that a captured graph calls where torch has no single one."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def draw(kind: str, p: float | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers: zeros and ones with probability `p` of a one (`bernoulli`), or 0 <= x < 1 (`uniform`)."""
    if kind == "uniform":
        return torch.rand(shape, dtype=dtype, device=device)
    assert p is not None
    return torch.empty(shape, dtype=dtype, device=device).bernoulli_(p)


def expand_like(tensor: Tensor, other: Tensor) -> Tensor:
    """`tensor` broadcast to what it and `other` have in common."""
    return tensor.expand(torch.broadcast_shapes(tensor.shape, other.shape))


@dataclass(frozen=True)
class Apply:
    """A custom `torch.autograd.Function` as one call."""

    function: type[torch.autograd.Function]

    @property
    def __name__(self) -> str:
        return self.function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call its `apply`."""
        return self.function.apply(*args, **kwargs)
