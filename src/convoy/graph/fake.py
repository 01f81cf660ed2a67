"""Tensors that share memory: a change of one in place is a change of the others, which a graph cannot say.

Tensors that have a shape, a type and a device but no numbers: the one file that uses torch's private module.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

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
