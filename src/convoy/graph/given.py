"""Networks as they are given: wrapped in others, compiled, without weights as yet, with tensors that they computed."""

import copy
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from convoy.errors import ConvoyError


def unwrapped(model: nn.Module) -> nn.Module:
    """The network that `torch.compile`, DataParallel or DistributedDataParallel wraps and computes the same as."""
    if isinstance(model, DataParallel | DistributedDataParallel):
        return unwrapped(cast(nn.Module, model.module))
    return unwrapped(cast(nn.Module, model._modules["_orig_mod"])) if _is_compiled(model) else model


def copied(model: nn.Module) -> nn.Module:
    """A copy, also with tensors that the network computed (`torch.nn.utils.weight_norm`), which torch does not copy."""
    tensors = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in tensors if not tensor.is_leaf})


def prepare_given(model: nn.Module, needs_numbers: bool = True) -> None:
    """Let parts that are compiled or in DataParallel run as they are; ConvoyError for what is no network to divide."""
    check_given(model, needs_numbers)
    for module in model.modules():
        if isinstance(module, DataParallel):
            module.device_ids = []  # it then calls its network
        elif _is_compiled(module):
            module.forward = cast(nn.Module, module._modules["_orig_mod"]).__call__
        elif compiled := vars(module).get("forward"):
            module.forward = getattr(compiled, "_torchdynamo_orig_callable", compiled)
        module._compiled_call_impl = None


def check_given(model: nn.Module, needs_numbers: bool = False) -> None:
    """Refuse what is no network that can be divided, in a sentence that says what to give in its place."""
    if not isinstance(model, nn.Module):
        raise ConvoyError(f"the network is of type {type(model).__name__}: give an nn.Module")
    if _is_compiled(model):
        raise ConvoyError(
            "the network is what torch.compile returned: give the network that it was given (net._orig_mod), with "
            "compile=True if it is to be compiled"
        )
    for name, module in model.named_modules():
        layer = f"layer {name}" if name else "the network"
        if why := _refused(module):
            raise ConvoyError(f"{layer} {why}")
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and is_lazy(tensor):
                why = "has no shape before a first pass: call the network once, net(example), then convoy.parallelize"
            elif needs_numbers and tensor is not None and tensor.is_meta:
                why = "is on the meta device and has no numbers: build the network within convoy.deferred() instead"
            if why:
                raise ConvoyError(f"{key} of {layer} {why}")


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules


def _refused(module: nn.Module) -> str:
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript, which does not show what it calls: give the module that was scripted or traced"
    if kind in ("DistributedDataParallel", "FullyShardedDataParallel"):
        return f"is in {kind}, which adds up gradients as Convoy does: give the network in it (net.module)"
    if isinstance(module, fx.GraphModule) and "train" in vars(module):
        return "comes from torch.export, which fixes its mode: give the module that was exported"
    return ""
