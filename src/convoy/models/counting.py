"""How large a network is: parameters, and floating-point operations for one image.

Nothing is computed: the network runs on torch's meta device, which knows shapes only.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from convoy.errors import ConvoyError
from convoy.models.factory import create, describe
from convoy.models.registry import REGISTRY


@dataclass(frozen=True)
class Counts:
    """Trainable and frozen `parameters` (buffers are none), and `flops` of the forward pass of one image."""

    parameters: int
    flops: int


def count(model: str | nn.Module, input_shape: tuple[int, int, int] | None = None) -> Counts:
    """Count the parameters of `model` (a name or a network) and the FLOPs of one image of `input_shape` (C, H, W).

    An `input_shape` of None is the network's own, where a name says which. FLOPs are those of the forward pass in
    evaluation, 2 for a multiply-add, of convolutions and matrix products (torch's FlopCounterMode): ResNet-50, to which
    papers give 4.1 billion multiply-adds, has 8.2 billion. The model is left as it was.
    Raises ConvoyError for an unknown name and for images that the network cannot take.
    """
    name = model if isinstance(model, str) else type(model).__name__
    default = describe(model).input_shape if isinstance(model, str) else None
    shape = input_shape or default
    if shape is None:
        raise ConvoyError(f"{name} does not say what images it takes: give the channels, height and width")
    with torch.random.fork_rng(devices=[]):
        try:
            return _count_on_meta(_on_meta(model, shape[0]), shape)
        except Exception:  # what the meta device cannot do, a real run of one image may
            network = create(model, in_channels=shape[0]) if isinstance(model, str) else model
    try:
        return _count_for_real(network, shape)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        small = f", and {name}-cifar is for 32x32" if f"{name}-cifar" in REGISTRY else ""
        instead = (
            f"{default[1]}x{default[2]} is its own size{small}"
            if default
            else "choose another image size or another net"
        )
        raise ConvoyError(
            f"{name} cannot take images of {shape[1]}x{shape[2]} pixels with {shape[0]} channels ({reason}): {instead}"
        ) from error


def _on_meta(model: str | nn.Module, in_channels: int) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    with torch.device("meta"):
        return create(model, in_channels=in_channels)


def _count_on_meta(model: nn.Module, shape: tuple[int, int, int]) -> Counts:
    """Run on tensors without storage in place of the model's parameters and buffers."""
    named = [*model.named_parameters(), *model.named_buffers()]
    shadow = {name: torch.empty_like(tensor, device="meta") for name, tensor in named}
    image = torch.empty(1, *shape, dtype=_dtype(model), device="meta")
    return Counts(num_parameters(model), _flops(lambda: torch.func.functional_call(model, shadow, (image,)), model))


def _count_for_real(model: nn.Module, shape: tuple[int, int, int]) -> Counts:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    image = torch.zeros(1, *shape, dtype=_dtype(model), device=device)
    return Counts(num_parameters(model), _flops(lambda: model(image), model))


def _flops(forward: Callable[[], object], model: nn.Module) -> int:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            forward()
    finally:
        for module in training:
            module.training = True
    return int(counter.get_total_flops())


def _dtype(model: nn.Module) -> torch.dtype:
    return next((parameter.dtype for parameter in model.parameters()), torch.float32)


def num_parameters(model: nn.Module) -> int:
    """Numbers in the parameters of `model`, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
