"""Networks that compute with several samples at once, and so cannot be given microbatches side by side."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy.engine.layerwise import Layerwise
from convoy.engine.network import network_of
from convoy.graph.graph import Call
from convoy.plans.coupling import coupling


def coupled_in_training(net: nn.Module) -> str | None:
    """What computes with several samples at once in training alone, where no trial can show it: the network draws
    random numbers; for a sentence.

    Args:
        net: what `convoy.parallelize` returned.

    Returns:
        None where there is nothing of the kind, or where evaluation has it too, of which a trial shows more.
    """
    network = network_of(net)
    if isinstance(network, Layerwise) or coupling(network.example_placement(False).graph) is not None:
        return None
    call = coupling(network.example_placement(True).graph)
    return _name(call) if call is not None else None


def coupled(net: nn.Module) -> str | None:
    """What in a parallelized network computes with several samples at once, batch norm aside; for a sentence.

    Args:
        net: what `convoy.parallelize` returned, of which a trial has shown that a sample's output depends on others
            of its batch.

    Returns:
        None where that is the work of batch norm alone, called as a function.
    """
    network = network_of(net)
    if isinstance(network, Layerwise):
        return "the network"
    graph = network.example_placement(True).graph
    call = coupling(graph)
    if call is not None:
        return _name(call)
    layers = {name for name, module in net.named_modules() if isinstance(module, _BatchNorm)}
    by_hand = any(call.op == "batch_norm" and call.layer not in layers for call in graph.calls)
    return None if by_hand else "the network"


def _name(call: Call) -> str:
    function = getattr(call.function, "__name__", "a call").strip("_")
    return f"{function} in {f'layer {call.layer}' if call.layer else 'the network itself'}"
