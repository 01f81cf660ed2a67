"""Calls that may overwrite what they are given: each saves a tensor, and a pass over fresh memory."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from convoy.engine.kernels import Kernel
from convoy.graph.graph import Call, Ref
from convoy.plans.place import PlacedCall, Placement

_ADDITIONS = ("add", "__add__", "__iadd__", "__radd__")
_GIVE_THEIR_OWN = ("conv", "linear", "batch_norm", "cat")
"""Kinds of calls that give a tensor of their own, which their backward pass does not read."""


class Overwriting:
    """Finds the calls of a placed network whose input nobody else reads.

    Args:
        placement: of the network.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._producers = {name: placed.call for placed in placement.calls for name in placed.call.outputs}

    @cached_property
    def _readers(self) -> dict[str, int]:
        found = {name: len(calls) for name, calls in self._placement.graph.consumers().items()}
        for name in self._placement.outputs:
            found[name] += 1
        return found

    def kernel(self, placed: PlacedCall) -> Kernel | None:
        """The version of a call that writes its result over an input, or None where it must not."""
        call = placed.call
        name = getattr(call.function, "__name__", "")
        if call.op != "elementwise" or not call.inputs or set(call.kwargs) - {"inplace"}:
            return None
        spare = [self._is_spare(placed, source) for source in call.inputs]
        if name == "relu" and call.args == (Ref(call.inputs[0]),) and spare[0]:
            return _relu
        terms = tuple(map(Ref, call.inputs))
        if name in _ADDITIONS and len(terms) == 2 and set(call.args) == set(terms) and not call.kwargs and any(spare):
            return _add_to_first if spare[0] else _add_to_second
        return None

    def _is_spare(self, placed: PlacedCall, name: str) -> bool:
        producer = self._producers.get(name)
        if producer is None or name in placed.transfers or self._readers[name] != 1:
            return False
        return producer.op in _GIVE_THEIR_OWN or _is_sum(producer)


def _is_sum(call: Call) -> bool:
    return call.op == "elementwise" and getattr(call.function, "__name__", "") in _ADDITIONS


def _relu(x: Tensor) -> Sequence[Tensor]:
    return [torch.relu_(x)]


def _add_to_first(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    alike = x.shape == y.shape and x.dtype == y.dtype and x.is_floating_point()
    return [x.add_(y) if alike else x + y]


def _add_to_second(x: Tensor, y: Tensor) -> Sequence[Tensor]:
    return _add_to_first(y, x)
