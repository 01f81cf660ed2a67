"""Functions that are several simpler ones, for which there are rules."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Steps = Callable[[], Any] | None


def _stack(tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Steps:
    if kwargs or not tensors:
        return None
    dim = dim % (tensors[0].dim() + 1)
    return lambda: torch.cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def _channel_shuffle(input: Tensor, groups: int) -> Steps:
    n, c, *size = input.shape
    return lambda: input.reshape(n, groups, c // groups, *size).transpose(1, 2).reshape(n, c, *size)


def _pixel_shuffle(input: Tensor, upscale_factor: int) -> Steps:
    if input.dim() != 4:
        return None
    n, c, h, w = input.shape
    r = upscale_factor
    return lambda: input.reshape(n, c // r**2, r, r, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // r**2, h * r, w * r)


def _pixel_unshuffle(input: Tensor, downscale_factor: int) -> Steps:
    if input.dim() != 4:
        return None
    n, c, h, w = input.shape
    r = downscale_factor
    return lambda: (
        input.reshape(n, c, h // r, r, w // r, r).permute(0, 1, 3, 5, 2, 4).reshape(n, c * r**2, h // r, w // r)
    )


def _expand(input: Tensor, *sizes: Any, **kwargs: Any) -> Steps:
    """As broadcasting with a constant, which has no size of its own on a rank that holds a part of the result."""
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    num_new_dims = len(sizes) - input.dim()
    if kwargs or not sizes or num_new_dims < 0:
        return None
    shape = [input.shape[place - num_new_dims] if size == -1 else size for place, size in enumerate(sizes)]
    if tuple(shape) == tuple(input.shape):
        return None
    return lambda: input.expand_as(torch.zeros(1, device=input.device).broadcast_to(shape))


def _glu(input: Tensor, dim: int = -1) -> Steps:
    def steps() -> Tensor:
        value, gate = input.chunk(2, dim)
        return value * gate.sigmoid()

    return steps


def _getitem(input: Tensor, index: Any) -> Steps:
    """`x[:, None]`: plain ranges first, new dimensions afterwards."""
    if not isinstance(index, tuple) or not any(item is None for item in index):
        return (lambda: input.unsqueeze(0)) if index is None else None
    if not all(item is None or item is Ellipsis or type(item) in (int, slice) for item in index):
        return None
    num_indices = sum(item is not None and item is not Ellipsis for item in index)
    ranges: list[Any] = []
    new_dims: list[int] = []
    place = 0
    for item in index:
        if item is None:
            new_dims.append(place)
            place += 1
        elif item is Ellipsis:
            ranges.append(item)
            place += input.dim() - num_indices
        else:
            ranges.append(item)
            place += isinstance(item, slice)

    def steps() -> Tensor:
        result = input[tuple(ranges)] if any(item is not Ellipsis and item != slice(None) for item in ranges) else input
        for dim in new_dims:
            result = result.unsqueeze(dim)
        return result

    return steps


def _pair(function: Callable[..., Any]) -> Callable[..., Steps]:
    return lambda input, other, **kwargs: None if kwargs else lambda: function(other, input)


# By name of the function: called with its arguments, gives what to call instead, or None to leave the call as it is.
EXPANSIONS: dict[str, Callable[..., Steps]] = {
    "__getitem__": _getitem,
    "__rmatmul__": _pair(torch.matmul),
    "channel_shuffle": _channel_shuffle,
    "expand": _expand,
    "glu": _glu,
    "native_channel_shuffle": _channel_shuffle,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    "reshape_as": lambda input, other: lambda: input.reshape(other.shape),
    "stack": _stack,
    "unbind": lambda input, dim=0: lambda: tuple(input.select(dim, index) for index in range(input.shape[dim])),
    "upsample": lambda *args, **kwargs: lambda: F.interpolate(*args, **kwargs),
    "view_as": lambda input, other: lambda: input.reshape(other.shape),
}
