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
            self._made[key] = self._tensor(*key)
        return self._made[key]

    def _tensor(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        if torch.is_inference_mode_enabled():  # a training pass may need what an evaluation has made
            with torch.inference_mode(False):  # which no compiled pass takes
                return torch.as_tensor(self._numbers, dtype=dtype, device=device)
        return torch.as_tensor(self._numbers, dtype=dtype, device=device)
