"""A forward pass that leaves no trace: in modules, in what they keep in lists and dicts, in random states."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from convoy.graph.errors import CaptureError

_DEPTH = 3


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Undo what is left behind by what runs within it.

    Raises CaptureError where it has drawn from the random numbers of python or numpy, which a graph cannot repeat.
    """
    kept: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        _keep(vars(module), kept, _DEPTH)
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
        if random.getstate() != python or not _same(np.random.get_state(), numpy):
            raise CaptureError("it draws from the random numbers of python or numpy in its forward pass")
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for container, before in kept.values():
            if isinstance(container, list):
                container[:] = before
            else:
                container.clear()
                container.update(before)


def _keep(container: Any, kept: dict[int, tuple[Any, Any]], depth: int) -> None:
    if depth == 0 or id(container) in kept or type(container) not in (dict, list, set):
        return
    kept[id(container)] = (container, type(container)(container))
    if not isinstance(container, set):
        for item in container.values() if isinstance(container, dict) else container:
            _keep(item, kept, depth - 1)


def _same(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
