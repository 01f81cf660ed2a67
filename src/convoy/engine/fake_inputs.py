"""Inputs for profiling: the network's own where they are at hand, others like them where they are not.

The contents matter: a maximum over noise mispredicts branches, and takes twice as long as one over equal numbers.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from convoy.engine.shards import cut
from convoy.graph.graph import Value
from convoy.plans.mesh import Coordinates
from convoy.plans.place import Placement
from convoy.plans.transfer import Step


def tiled(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What is in a tensor, repeated or cut off along every dimension to another shape of as many dimensions."""
    if not x.numel():
        return x.new_zeros(shape)
    for dim, length in enumerate(shape):
        if length != x.shape[dim]:
            x = x.index_select(dim, torch.arange(length, device=x.device) % x.shape[dim])
    return x


def source(
    value: Value,
    placement: Placement,
    place: Coordinates,
    device: torch.device,
    contents: Mapping[str, Tensor],
    channels_last: bool = False,
) -> Tensor:
    """A rank's part of an input, a parameter or a buffer; `place` is the rank's on the mesh. `contents` has whole
    parameters and buffers, and images of any number, as far as they are at hand. Images lie in memory as
    `channels_last` says; parameters that are at hand stay as they are."""
    layout = placement.layouts[value.name]
    shape = layout.local_shape(value.shape, placement.mesh, place)
    whole = contents.get(value.name)
    if whole is not None and value.origin == "input":
        return contiguous(tiled(whole, shape).to(device), channels_last)
    if whole is not None:
        part = cut(whole.detach(), layout, placement.mesh, place).to(device)
        part = part.clone() if part.data_ptr() == whole.data_ptr() else part
        return part.requires_grad_(value.origin == "parameter")
    if not value.dtype.is_floating_point:
        return torch.zeros(shape, dtype=value.dtype, device=device)
    if value.origin == "buffer":
        return torch.ones(shape, dtype=value.dtype, device=device)
    spread = 1.0 if value.origin == "input" or len(shape) < 2 else 1.0 / math.sqrt(max(1, math.prod(shape[1:])))
    tensor = contiguous(torch.randn(shape, dtype=value.dtype, device=device) * spread, channels_last)
    return tensor.requires_grad_(value.origin == "parameter")


def contiguous(tensor: Tensor, channels_last: bool) -> Tensor:
    """The tensor without gaps, images with the channels innermost in memory if that is how the network has them."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    memory_format = formats.get(tensor.dim(), torch.contiguous_format) if channels_last else torch.contiguous_format
    return tensor.contiguous(memory_format=memory_format)


class NoTransfer:
    """What stands for the steps of a transfer: gives what they would give, as if the others had what this rank has.
    `shape` is that of the whole tensor, and `place` the rank's on the mesh."""

    def __init__(
        self,
        steps: tuple[Step, ...],
        shape: tuple[int, ...],
        placement: Placement,
        place: Coordinates,
        channels_last: bool,
    ) -> None:
        layouts = steps[0].source, steps[-1].target
        self._before, self._after = (layout.local_shape(shape, placement.mesh, place) for layout in layouts)
        self._channels_last = channels_last

    def __call__(self, x: Tensor) -> Tensor:
        """From the rank's part before the transfer to that after it."""
        result: Tensor = _NoTransfer.apply(x, self)
        return result

    def forward(self, x: Tensor) -> Tensor:
        return self._new(x, self._after)

    def backward(self, gradient: Tensor) -> Tensor:
        return self._new(gradient, self._before)

    def _new(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        result = contiguous(tiled(like, shape), self._channels_last)
        return result.clone() if result.data_ptr() == like.data_ptr() else result


class _NoTransfer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: NoTransfer) -> Tensor:
        ctx.way = way
        return way.forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.way.backward(gradient), None
