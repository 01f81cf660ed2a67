"""What tests of saving share: values compared, and the sentence of a refusal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from convoy.errors import ConvoyError


def alike(a: Any, b: Any, tolerance: float = 1e-9) -> bool:
    """Whether nested values have the same types, keys and shapes, and their tensors the same numbers: of each the
    largest error is relative to its largest number; at a tolerance of 0 all bits are compared."""
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        if not tolerance or not a.is_floating_point():
            return torch.equal(a, b)
        return not a.numel() or bool((a - b).abs().max() <= tolerance * (1e-3 + b.abs().max()))
    if type(a) is type(b) and isinstance(a, dict):
        return list(a) == list(b) and alike([*a.values()], [*b.values()], tolerance)
    if type(a) is type(b) and isinstance(a, list | tuple):
        return len(a) == len(b) and all(alike(*both, tolerance) for both in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def refused(call: Callable[..., Any], *args: Any, **named: Any) -> str:
    """The sentence with which a call is refused."""
    with pytest.raises(ConvoyError) as caught:
        call(*args, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)
