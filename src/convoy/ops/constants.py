"""Numbers that every pass needs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Constants:
    """Numbers as a tensor, on whatever device needs them.

    They are copied there once: with a copy in every pass the host of a GPU would wait for it.
    """

    def __init__(self, numbers: Sequence[Any] | Tensor) -> None:
        self._numbers = numbers
        self._made: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """On the device of `x`, in its type or another."""
        key = x.device, dtype or x.dtype
        if key not in self._made:
            with torch.inference_mode(False):  # a training pass may need what an evaluation has made
                self._made[key] = torch.as_tensor(self._numbers, dtype=key[1], device=key[0])
        return self._made[key]
