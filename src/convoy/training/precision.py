"""Torch's switches, and training in low precision: whether a device can, tried out, and the scale of fp16's loss.

A recipe that leaves its precision open is settled first (`convoy.training.defaults`).
"""

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F

from convoy.errors import ConvoyError
from convoy.training.derived import num_threads
from convoy.training.recipe import Recipe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: str | None, device: torch.device) -> None:
    """Run one small convolution and matrix product forwards and backwards as the training would; a precision that is
    left open is not checked. A ConvoyError where torch cannot do that on this device says what to choose.
    """
    if precision not in ("bf16", "fp16"):
        return
    images = torch.ones(2, 8, 8, 8, device=device)
    weight = torch.full((8, 8, 3, 3), 0.01, device=device, requires_grad=True)
    matrix = torch.full((8, 8), 0.01, device=device, requires_grad=True)
    reason = "gradients are not finite"
    try:
        with torch.autocast(device.type, DTYPES[precision]):
            loss = F.linear(F.conv2d(images, weight, padding=1).mean((2, 3)), matrix).float().sum()
        loss.backward()
        if all(p.grad is not None and bool(p.grad.isfinite().all()) for p in (weight, matrix)):
            return
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
    choices = "bf16 or fp32" if precision == "fp16" else "fp32"
    raise ConvoyError(f"precision={precision} does not train on {device} here ({reason}): choose {choices}")


class Scaler(torch.amp.GradScaler):
    """Scales the loss so that gradients in fp16 do not vanish, and skips updates in which some overflowed. With any
    other precision it does nothing, and asks nobody.

    Where ranks hold different gradients, only the rank that has the part that overflowed would know of it, and the
    weights and the scale would drift apart: all ranks agree once for each update, for which each reads its device.
    `anywhere` tells whether something holds on any rank, and all ranks call it; None where all of them have the same
    gradients: then nothing is read.
    """

    def __init__(
        self, device: torch.device, precision: str | None, anywhere: Callable[[bool], bool] | None = None
    ) -> None:
        super().__init__(device.type, enabled=precision == "fp16")
        self._anywhere = anywhere
        if self.is_enabled():
            self.scale(torch.zeros((), device=device))  # a stage without the loss never does, and torch asks for it

    def _unscale_grads_(self, *args: Any, **options: Any) -> dict[torch.device, torch.Tensor]:
        """Torch's own name: gives for every device a number that is not 0 if gradients on it overflowed."""
        overflows = super()._unscale_grads_(*args, **options)
        if self._anywhere is None:
            return overflows
        overflowed_on_rank = any(bool(number) for number in overflows.values())
        if self._anywhere(overflowed_on_rank) and not overflowed_on_rank:
            for number in overflows.values():
                number.fill_(1.0)
        return overflows


def autocast_of(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a forward pass in the recipe's precision."""
    precision = lowered(recipe)
    return contextlib.nullcontext() if precision is None else torch.autocast(device.type, precision)


def lowered(recipe: Recipe) -> torch.dtype | None:
    """In which type autocast has layers compute; None without it, and where that is left open."""
    return None if recipe.precision in (None, "auto", "fp32") else DTYPES[recipe.precision]


def set_numerics(recipe: Recipe) -> None:
    """Set the process's threads and torch's switches as the recipe asks."""
    torch.set_num_threads(num_threads(recipe))
    if recipe.reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses to be deterministic
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time
    torch.use_deterministic_algorithms(recipe.reproducible)
    torch.backends.cudnn.benchmark = not recipe.reproducible
