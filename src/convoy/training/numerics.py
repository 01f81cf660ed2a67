"""Torch's switches and the precision of a run."""

import contextlib
import os
from contextlib import AbstractContextManager
from typing import Any

import torch

from convoy.training.derived import num_threads
from convoy.training.optimization.precision import DTYPES
from convoy.training.recipe import Recipe


def autocast_of(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a forward pass in the recipe's precision."""
    if recipe.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, DTYPES[recipe.precision])


def set_numerics(recipe: Recipe) -> None:
    """Set the process's threads and torch's switches as the recipe asks."""
    torch.set_num_threads(num_threads(recipe))
    if recipe.reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses to be deterministic
    torch.use_deterministic_algorithms(recipe.reproducible)
    torch.backends.cudnn.benchmark = not recipe.reproducible
