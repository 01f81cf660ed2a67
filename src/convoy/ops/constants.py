"""Numbers that every pass needs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Constants:
    """Numbers as a tensor, copied once to each device that needs them: with a copy in every pass the host of a GPU
    would wait for it."""

    def __init__(self, numbers: Sequence[Any] | Tensor) -> None:
        # numpy keeps whole numbers whole and others in double precision
        self._numbers = numbers if isinstance(numbers, Tensor) else torch.from_numpy(np.array(numbers))
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor on the device of `x`, in its type or another."""
        key = x.device, dtype or x.dtype
        tensor = self._copies.get(key)
        if tensor is None:
            with torch.inference_mode(False):  # a training pass may need what an evaluation has made
                tensor = self._numbers.to(*key)
            if not torch.compiler.is_compiling():
                self._copies[key] = tensor
        return tensor
