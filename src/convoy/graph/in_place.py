"""Functions that change a tensor, and those that give the same as a new one."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Replacement = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def out_of_place(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Replacement | None:
    """The call that gives as a new tensor what `func` writes into its first argument; None where it writes nothing."""
    if kwargs.get("inplace"):
        return func, args, {**kwargs, "inplace": False}
    plain = name[:-1] if name.endswith("_") and not name.endswith("__") else None
    if plain is None and name.startswith("__i") and name.endswith("__") and hasattr(Tensor, f"__{name[3:]}"):
        plain = f"__{name[3:]}" if name not in ("__int__", "__invert__", "__index__", "__init__") else None
    if not plain:
        return None
    for home in (Tensor, torch, F):
        if callable(found := getattr(home, plain, None)):
            return found, args, kwargs
    return None
