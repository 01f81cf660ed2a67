"""How large a network is: parameters, and floating-point operations for one image.

Nothing is computed: the network runs on torch's meta device, which knows shapes only.
"""

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
            with torch.device("meta"):
                network = create(model, in_channels=shape[0]) if isinstance(model, str) else model
            return _count(network, shape, torch.device("meta"))
        except Exception:  # what the meta device cannot do, a real run of one image may
            network = create(model, in_channels=shape[0]) if isinstance(model, str) else model
    try:
        return _count(network, shape, next((x.device for x in network.parameters()), torch.device("cpu")))
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


def _count(model: nn.Module, shape: tuple[int, int, int], device: torch.device) -> Counts:
    """Run on a device: on the meta device with tensors in place of the model's that have no numbers."""
    named = dict([*model.named_parameters(), *model.named_buffers()])
    state = {name: torch.empty_like(x, device=device) if device.type == "meta" else x for name, x in named.items()}
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    image = torch.zeros(1, *shape, dtype=dtype, device=device)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            torch.func.functional_call(model, state, (image,))
    finally:
        for module in training:
            module.training = True
    parameters = sum(parameter.numel() for parameter in model.parameters())  # shared ones once
    return Counts(parameters, int(counter.get_total_flops()))
