"""Tensors of a network that are always the same: tables, masks, grids; they are computed once, at the capture."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from convoy.graph import tree
from convoy.graph.fake import Fakes, FakeTensor


class Constants:
    """The numbers behind those fake tensors that depend on no input, parameter or buffer.

    Attributes:
        named: the constants that calls use, by name, as they were when the call used them.
    """

    def __init__(self, fakes: Fakes) -> None:
        self.named: dict[str, Tensor] = {}
        self._fakes = fakes
        self._real: dict[int, Tensor] = {}
        self._names: dict[int, tuple[str, int]] = {}
        self._kept: list[Tensor] = []

    def known(self, tensor: Tensor) -> bool:
        """Whether this is the fake of a constant."""
        return id(tensor) in self._real

    def value(self, tensor: Tensor) -> Tensor:
        """The numbers of a constant."""
        return self._real.get(id(tensor), tensor)

    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor alive, so that no other gets its id."""
        self._kept.append(tensor)

    def forget(self, tensor: Tensor) -> None:
        """The tensor is no constant any more."""
        self._real.pop(id(tensor), None)

    def full(self, tensor: Tensor, value: float) -> Tensor:
        """Make a fake tensor the constant that is `value` everywhere."""
        with self._fakes.real():
            self._real[id(tensor)] = torch.full(tensor.shape, value, dtype=tensor.dtype, device=tensor.device)
        return tensor

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function on constants; its tensors come back as fakes, other results as they are."""
        with self._fakes.real():
            real_args, real_kwargs = tree.replace((args, kwargs), Tensor, self._to_real)
            result = function(*real_args, **real_kwargs)
        given = tree.leaves((args, kwargs), Tensor)
        same = {id(self._real[id(tensor)]): tensor for tensor in given if id(tensor) in self._real}
        return tree.replace(result, Tensor, lambda real: same[id(real)] if id(real) in same else self._to_fake(real))

    def everywhere(self, tensor: Tensor) -> float | None:
        """The one number that a constant consists of, where it does."""
        real = self.value(tensor)
        with self._fakes.real():
            first = real.flatten()[:1]
            return first.item() if len(first) and bool((real == first).all()) else None

    def name(self, tensor: Tensor, taken: Collection[str]) -> str:
        """The name under which a call uses a constant."""
        real = self.value(tensor)
        if id(tensor) in self._names and self._names[id(tensor)][1] == real._version:
            return self._names[id(tensor)][0]
        number = 0
        while (name := f"constant_{number}" if number else "constant") in taken:
            number += 1
        self._names[id(tensor)] = (name, real._version)
        self.keep(tensor)
        with self._fakes.real():
            self.named[name] = _snapshot(real.detach())
        return name

    def _to_real(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor) and id(tensor) not in self._real:  # only its shape is asked for
            return torch.empty(1, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        return self._real.get(id(tensor), tensor)

    def _to_fake(self, real: Tensor) -> Tensor:
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)
        self._real[id(fake)] = real
        self.keep(fake)
        return fake


def _snapshot(real: Tensor) -> Tensor:
    """A copy of a constant, which takes no memory where one number is everywhere."""
    first = real[(slice(0, 1),) * real.dim()]
    if real.numel() > 1 and bool((real == first).all()):
        return first.clone().expand(real.shape)
    return real.clone()
