"""What a module consists of: its layers, parameters and buffers, and who holds them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


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
