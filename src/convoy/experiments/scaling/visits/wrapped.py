"""A network as users of other tools train it: plain PyTorch, DistributedDataParallel, Lightning Fabric, accelerate."""

import contextlib
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from convoy.engine.groups import join as join_group


@dataclass(frozen=True)
class Wrapped:
    """A network ready to be trained.

    Attributes:
        backward: of a loss.
        unfinished: the context of a pass whose gradients are not exchanged.
    """

    network: Callable[..., Any]
    optimizer: Optimizer
    backward: Callable[[Tensor], None] = Tensor.backward
    unfinished: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


def wrap(kind: str, model: nn.Module, optimizer: Optimizer, num: int, device: torch.device) -> Wrapped:
    """A network as a peer trains it. All ranks call it; it joins them, if nobody has.

    The peers take the group that there is: one of their own would meet in a store that listens on all interfaces.

    Args:
        kind: `torch` for plain PyTorch, or a key of `PEERS`.
        model: on its device.
        optimizer: of its parameters.
        num: how many ranks there are.
        device: of this one.
    """
    wrappers = {"torch": _torch, "ddp": _ddp, "fabric": _fabric, "accelerate": _accelerate}
    if num > 1:
        join_group()
    return wrappers[kind](model, optimizer, num, device)


def _torch(model: nn.Module, optimizer: Optimizer, num: int, device: torch.device) -> Wrapped:
    return Wrapped(model, optimizer)


def _ddp(model: nn.Module, optimizer: Optimizer, num: int, device: torch.device) -> Wrapped:
    from torch.nn.parallel import DistributedDataParallel

    network = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Wrapped(network, optimizer, unfinished=network.no_sync)


def _fabric(model: nn.Module, optimizer: Optimizer, num: int, device: torch.device) -> Wrapped:
    lightning = importlib.import_module("lightning.fabric")
    strategy = importlib.import_module("lightning.fabric.strategies").DDPStrategy(gradient_as_bucket_view=True)
    fabric = lightning.Fabric(accelerator=device.type, devices=num, strategy=strategy)
    fabric.launch()
    network, wrapped = fabric.setup(model, optimizer)
    return Wrapped(network, wrapped, fabric.backward, lambda: fabric.no_backward_sync(network))


def _accelerate(model: nn.Module, optimizer: Optimizer, num: int, device: torch.device) -> Wrapped:
    library = importlib.import_module("accelerate")
    wishes = library.DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = library.Accelerator(cpu=device.type == "cpu", kwargs_handlers=[wishes])
    network, wrapped = accelerator.prepare(model, optimizer)
    return Wrapped(network, wrapped, accelerator.backward, lambda: accelerator.no_sync(network))
