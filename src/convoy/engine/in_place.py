"""Calls that may overwrite what they are given: each saves a tensor, and a pass over fresh memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from convoy.engine.kernels import Kernel
from convoy.plans.overwriting import Readers, overwritten
from convoy.plans.place import PlacedCall, Placement


class Overwriting:
    """Finds the calls of a placed network whose input nobody else reads.

    Args:
        placement: of the network.
    """

    def __init__(self, placement: Placement) -> None:
        self._readers = Readers(placement.graph, placement.outputs)

    def kernel(self, placed: PlacedCall) -> Kernel | None:
        """The version of a call that writes its result over an input, or None where it must not."""
        name = overwritten(placed.call, lambda source: self._is_spare(placed, source))
        if name is None:
            return None
        if len(placed.call.inputs) == 1:
            return _relu
        return _add_to_first if name == placed.call.inputs[0] else _add_to_second

    def _is_spare(self, placed: PlacedCall, name: str) -> bool:
        return self._readers.is_spare(name, placed.transfers)


def _relu(x: Tensor) -> Sequence[Tensor]:
    return [torch.relu_(x)]


def _add_to_first(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    alike = x.shape == y.shape and x.dtype == y.dtype and x.is_floating_point()
    return [x.add_(y) if alike else x + y]


def _add_to_second(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return _add_to_first(y, x)
