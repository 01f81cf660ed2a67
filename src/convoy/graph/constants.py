"""Tensors that a network makes empty: what they are is decided by what is written to them first.

Tensors of a network that are always the same: tables, masks, grids; they are computed once, at the capture.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from convoy.graph import tree
from convoy.graph.fake import Fakes, FakeTensor
from convoy.graph.graph import CaptureError


class Constants:
    """The numbers behind those fake tensors that depend on no input, parameter or buffer. `named` holds the constants
    that calls use as they were when the call used them, `kept` the tensors that are kept alive so that no others get
    their ids, and `outside` those that existed before the capture."""

    def __init__(self, fakes: Fakes) -> None:
        self.named: dict[str, Tensor] = {}
        self.outside: dict[int, Tensor] = {}
        self.fakes = fakes
        self._real: dict[int, Tensor] = {}
        self._names: dict[int, tuple[str, int]] = {}
        self.kept: list[Tensor] = []

    def known(self, tensor: Tensor) -> bool:
        return id(tensor) in self._real

    def value(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._real:
            self.outside[id(tensor)] = tensor
        return self._real.get(id(tensor), tensor)

    def keep(self, tensor: Tensor) -> None:
        self.kept.append(tensor)

    def forget(self, tensor: Tensor) -> None:
        self._real.pop(id(tensor), None)

    def full(self, tensor: Tensor, value: float) -> Tensor:
        """Make a fake tensor the constant that is `value` everywhere."""
        with self.fakes.real():
            self._real[id(tensor)] = torch.full(tensor.shape, value, dtype=tensor.dtype, device=tensor.device)
        return tensor

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.fakes.real():
            real_args, real_kwargs = tree.replace((args, kwargs), Tensor, self._to_real)
            result = function(*real_args, **real_kwargs)
        arguments = tree.leaves((args, kwargs), Tensor)
        fake_of = {id(self._real[id(tensor)]): tensor for tensor in arguments if id(tensor) in self._real}
        return tree.replace(
            result, Tensor, lambda real: fake_of[id(real)] if id(real) in fake_of else self._to_fake(real)
        )

    def everywhere(self, tensor: Tensor) -> float | None:
        """The one number that a constant consists of, where it does."""
        real = self.value(tensor)
        with self.fakes.real():
            first = real.flatten()[:1]
            return first.item() if len(first) and bool((real == first).all()) else None

    def name(self, tensor: Tensor, names: Collection[str]) -> str:
        real = self.value(tensor)
        if id(tensor) in self._names and self._names[id(tensor)][1] == real._version:
            return self._names[id(tensor)][0]
        number = 0
        while (name := f"constant_{number}" if number else "constant") in names:
            number += 1
        self._names[id(tensor)] = (name, real._version)
        self.keep(tensor)
        with self.fakes.real():
            self.named[name] = _snapshot(real.detach())
        return name

    def _to_real(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor) and id(tensor) not in self._real:  # only its shape is asked for
            return torch.empty(1, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        return self.value(tensor)

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


Draw = tuple[str, float | None]  # kind of random numbers, and their probability where they have one


class Blanks:
    """Empty tensors to which nothing was written yet."""

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self._blank: set[int] = set()

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._blank

    def make(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        blank: Tensor = function(*args, **kwargs)
        self._constants.keep(blank)
        self._blank.add(id(blank))
        return blank

    def forget(self, tensor: Tensor) -> None:
        self._blank.discard(id(tensor))

    def fill(
        self, name: str, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], layer: str
    ) -> Draw | Tensor:
        """Apply the first write to an empty tensor, by the function `name` with its other arguments. Gives the tensor,
        a constant from now on, or the random numbers that it is to be; CaptureError for other writes."""
        if name == "bernoulli_":
            p = args[0] if args else kwargs.get("p", 0.5)
            return "bernoulli", probability(self._constants, p, layer) if isinstance(p, Tensor) else float(p)
        if name == "uniform_" and (*args, *kwargs.values()) in ((), (0, 1)):
            return "uniform", None
        if name in ("zero_", "fill_") and not tree.leaves((args, kwargs), Tensor):
            self.forget(tensor)
            return self._constants.full(tensor, 0 if name == "zero_" else (*args, *kwargs.values())[0])
        raise CaptureError(f"it calls {name} on an empty tensor", layer)


def probability(constants: Constants, tensor: Tensor, layer: str) -> float:
    """The one probability that a constant consists of; CaptureError where it has several."""
    p = constants.everywhere(tensor)
    if p is None:
        raise CaptureError("it draws random numbers with several probabilities", layer)
    return p
