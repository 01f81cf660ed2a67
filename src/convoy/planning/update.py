"""Measures the optimiser: seconds for a byte and for a tensor."""

import inspect
import time
from statistics import median

import torch
from torch import nn

from convoy.cost.update import Update
from convoy.engine.gradients.sharded import ELEMENTWISE
from convoy.errors import ConvoyError
from convoy.planning.workload import MakeOptimizer

_POINTS = ((1, 2**24), (16, 2**20), (256, 2**16), (128, 64))
"""Tensors, and numbers in each: large ones do not fit into the caches, as in training."""


def check_optimizer(make: MakeOptimizer) -> None:
    """Refuse an optimiser whose updates cannot be timed.

    Raises:
        ConvoyError: its step calls a function that computes loss and gradients, as often as it likes.
    """
    optimizer = make([nn.Parameter(torch.zeros(1))])
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        name = type(optimizer).__name__
        raise ConvoyError(
            f"{name} computes the gradients several times in a step, so an update cannot be predicted: plan with "
            "another optimiser, e.g. SGD, and leave the optimiser's time out of account"
        )


def measure_update(make: MakeOptimizer, device: torch.device, repetitions: int = 5) -> Update:
    """Time the optimiser on tensors of several sizes.

    Args:
        make: makes it for some parameters.
        device: where they are.
        repetitions: of each, the median counts.
    """
    measured = []
    state = 0
    optimizer = None
    for tensors, numel in _POINTS:
        parameters = [nn.Parameter(torch.full((numel,), 0.5, device=device)) for _ in range(tensors)]
        optimizer = make(parameters)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()  # makes the state
        seconds = median(_time(optimizer, device) for _ in range(repetitions))
        measured.append((tensors * numel * 4, tensors, seconds))
        held = (t for entries in optimizer.state.values() for t in entries.values() if isinstance(t, torch.Tensor))
        state = max(state, round(sum(t.numel() for t in held) / (tensors * numel)))
    return Update.fit(measured, state=float(state), divisible=type(optimizer) in ELEMENTWISE)


def _time(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
