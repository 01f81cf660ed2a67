"""What a module consists of: its layers, parameters and buffers, and who holds them."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from convoy.errors import ConvoyError


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Contents:
    """Remembers the layers and parameters that a module has now.

    Attributes:
        checksum: of the parameters' types and kinds of device, when `cast` was last called.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[dict[str, Any], str, str, nn.Module | nn.Parameter | None]] = []
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            for where in (module._modules, module._parameters):
                self._held += [(where, key, f"{prefix}{key}", each) for key, each in where.items()]
        self._parameters = list(model.parameters())
        self._types = self._current_types()
        self.checksum = self._checksum()

    def cast(self) -> bool:
        """Whether parameters have been given another type or device since this was asked last."""
        before, self._types = self._types, self._current_types()
        if before == self._types:
            return False
        self.checksum = self._checksum()
        return True

    def _checksum(self) -> int:
        """Of the types and kinds of device, to compare between ranks."""
        return zlib.crc32(repr([(str(dtype), device.type) for dtype, device in self._types]).encode())

    def _current_types(self) -> list[tuple[torch.dtype, torch.device]]:
        return [(parameter.dtype, parameter.device) for parameter in self._parameters]

    def check(self) -> None:
        """See that it has the same ones still; some 0.1 µs for each.

        Raises:
            ConvoyError: one was replaced, or taken out.
        """
        for where, key, name, each in self._held:
            if where.get(key) is not each:
                raise ConvoyError(
                    f"{name} was replaced or taken out after convoy.parallelize, which knows nothing of what takes its "
                    "place: build the network anew, replace it, then call convoy.parallelize"
                )


def owners(model: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """For every parameter and buffer the dictionary that holds it, and its key there."""
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for name in named_tensors(model):
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        found[name] = (module._parameters if key in module._parameters else module._buffers), key
    return found


@contextmanager
def plain_forward(model: nn.Module) -> Iterator[None]:
    """The model with the forward pass of its class."""
    own = model.__dict__.pop("forward", None)
    try:
        yield
    finally:
        if own is not None:
            model.__dict__["forward"] = own
