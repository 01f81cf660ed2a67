"""The tensors of a capture: fakes, which have a shape, a type and a device but no numbers (the one file that uses
torch's private module); which of them share memory, so that a change of one is a change of others; and the numbers of
those that are always the same, as tables, masks and grids are."""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from convoy.graph import tree
from convoy.graph.graph import CaptureError


class Fakes(FakeTensorMode):
    """While it is entered, tensor operations compute shapes only; `draws` counts those that ask for random numbers."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def note(self, operation: Any, args: Any, kwargs: Any) -> None:
        if torch.Tag.nondeterministic_seeded in operation.tags:
            names = [argument.name for argument in operation._schema.arguments]
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            self.draws += "dropout_p" not in names or arguments.get("dropout_p", 0) != 0  # attention draws nothing at 0

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Within it an operation that cannot be is not logged with a traceback: its error says enough."""
        logger = logging.getLogger(FakeTensorMode.__module__)
        was_disabled, logger.disabled = logger.disabled, True
        try:
            yield
        finally:
            logger.disabled = was_disabled

    @contextmanager
    def real(self) -> Iterator[None]:
        with unset_fake_temporarily(), _Count(self):
            yield


class _Count(TorchDispatchMode):
    def __init__(self, fakes: Fakes) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._fakes.note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def storage(tensor: Tensor) -> int:
    """The same number for tensors that share their memory."""
    return int(tensor.untyped_storage()._cdata)


class Aliases:
    """Every tensor of a capture by the memory it uses; keeps them alive, so that ids and memory stay theirs."""

    def __init__(self) -> None:
        self._sharing: dict[int, dict[int, Tensor]] = {}
        self._protected: dict[int, str] = {}
        self._outdated: dict[int, str] = {}

    def add(self, tensor: Tensor) -> None:
        """A tensor that has the right numbers now."""
        self._sharing.setdefault(storage(tensor), {})[id(tensor)] = tensor
        self._outdated.pop(id(tensor), None)

    def protect(self, tensor: Tensor, name: str) -> None:
        """A parameter or buffer, which nothing may change."""
        self._protected[storage(tensor)] = name
        self.add(tensor)

    def write(self, tensor: Tensor, layer: str) -> None:
        """`tensor` is changed in place: the others that share its memory are not to be used again."""
        for alias in self._sharing.get(storage(tensor), {}):
            if alias != id(tensor):
                self._outdated[alias] = layer

    def check(self, tensor: Tensor, layer: str) -> None:
        """Raise CaptureError where something else has changed this tensor in place."""
        if (changed_by := self._outdated.get(id(tensor))) is not None:
            raise CaptureError(f"it uses a tensor that {changed_by or 'the network'} changed through a view", layer)

    def check_writable(self, tensor: Tensor, function: str, layer: str) -> None:
        """Raise CaptureError where a tensor's memory is that of a parameter or buffer."""
        if (name := self._protected.get(storage(tensor))) is not None:
            raise CaptureError(f"{function} changes {name} in place", layer)


Draw = tuple[str, float | None]  # kind of random numbers, and their probability where they have one


class Constants:
    """The numbers behind those fake tensors that depend on no input, parameter or buffer. `named` holds the constants
    that calls use as they were when the call used them, `kept` the tensors that are kept alive so that no others get
    their ids, and `outside` those that existed before the capture."""

    def __init__(self, fakes: Fakes) -> None:
        self.named: dict[str, Tensor] = {}
        self.outside: dict[int, Tensor] = {}
        self.fakes = fakes
        self._real: dict[int, Tensor | None] = {}  # None for what is empty and has not been read yet
        self._names: dict[int, tuple[str, int]] = {}
        self.kept: list[Tensor] = []

    def known(self, tensor: Tensor) -> bool:
        return id(tensor) in self._real

    def value(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._real:
            self.outside[id(tensor)] = tensor
            return tensor
        real = self._real[id(tensor)]
        if real is None:
            with self.fakes.real():
                real = self._real[id(tensor)] = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return real

    def empty(self, tensor: Tensor) -> Tensor:
        self.kept.append(tensor)
        self._real[id(tensor)] = None
        return tensor

    def forget(self, tensor: Tensor) -> None:
        self._real.pop(id(tensor), None)

    def drawing(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], layer: str) -> Draw | None:
        """What a function draws: `bernoulli` of a constant, or what `bernoulli_` and `uniform_` write over one; None
        for another distribution, or the numbers of a generator."""
        if kwargs.get("generator") is not None:
            return None
        if name == "uniform_":
            return ("uniform", None) if (*args[1:], *kwargs.values()) in ((), (0, 1)) else None
        p = (*args[1:], kwargs.get("p", args[0] if name == "bernoulli" else 0.5))[0]
        return "bernoulli", self.probability(p, layer) if isinstance(p, Tensor) else float(p)

    def probability(self, tensor: Tensor, layer: str) -> float:
        """The one number that a constant consists of; CaptureError where it has several."""
        real = self.value(tensor)
        with self.fakes.real():
            first = real.flatten()[:1]
            if len(first) and bool((real == first).all()):
                return float(first.item())
        raise CaptureError("it draws random numbers with several probabilities", layer)

    def compute(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.fakes.real():
            real_args, real_kwargs = tree.replace((args, kwargs), Tensor, self._to_real)
            result = function(*real_args, **real_kwargs)
        arguments = tree.leaves((args, kwargs), Tensor)
        fake_of = {id(self._real[id(tensor)]): tensor for tensor in arguments if id(tensor) in self._real}
        return tree.replace(
            result, Tensor, lambda real: fake_of[id(real)] if id(real) in fake_of else self._to_fake(real)
        )

    def name(self, tensor: Tensor, names: Collection[str]) -> str:
        real = self.value(tensor)
        if id(tensor) in self._names and self._names[id(tensor)][1] == real._version:
            return self._names[id(tensor)][0]
        number = 0
        while (name := f"constant_{number}" if number else "constant") in names:
            number += 1
        self._names[id(tensor)] = (name, real._version)
        self.kept.append(tensor)
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
        self.kept.append(fake)
        return fake


def _snapshot(real: Tensor) -> Tensor:
    """A copy of a constant, which takes no memory where one number is everywhere."""
    first = real[(slice(0, 1),) * real.dim()]
    if real.numel() > 1 and bool((real == first).all()):
        return first.clone().expand(real.shape)
    return real.clone()
