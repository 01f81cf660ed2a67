"""What a network computes, in words: kept in checkpoints, so that no run is gone on with by other code unnoticed."""

import re
import zlib

import torch
from torch import Tensor, nn

from convoy.errors import ConvoyError
from convoy.graph.graph import Call, Graph, Ref

# Of every call in training, in order: its layer; the function with its constants; the shapes of its outputs; and a
# checksum of its inputs.
Code = list[list[str]]
_OF_THIS_PROCESS = re.compile(r"(, )?(device=)?device\([^)]*\)| at 0x[0-9a-f]+")


class OtherCodeError(ConvoyError):
    """The network computes something else than when the checkpoint was written; the run is as it was."""


def code_of(model: nn.Module, graph: Graph | None) -> Code:
    """Of the plain network, which does not depend on the plan; without a graph, of the layers that it has."""
    if graph is None:
        layers = ((name, module) for name, module in model.named_modules() if name)
        return [[name, f"{type(module).__name__}({module.extra_repr()})", "", ""] for name, module in layers]
    return [[call.layer, _function(call), _shapes(call, graph), _taken(call, graph)] for call in graph.calls]


def difference(was: Code, now: Code) -> str:
    """The first layer that differs, and in what; empty where none does.

    >>> difference([["act", "silu", "2x4", "1"]], [["act", "relu", "2x4", "1"]])
    'layer act was silu and is relu'
    """
    place = next((i for i, (one, other) in enumerate(zip(was, now, strict=False)) if one != other), None)
    if place is None:
        rest = was[len(now) :] or now[len(was) :]
        return f"{rest[0][1]} of {_who(rest[0][0])} is {'new' if len(now) > len(was) else 'gone'}" if rest else ""
    (layer, function, shapes, _), (own_layer, own_function, own_shapes, _) = was[place], now[place]
    if layer != own_layer:
        return f"{own_function} of {_who(own_layer)} comes where {function} of {_who(layer)} came"
    if function != own_function:
        return f"{_who(layer)} was {function} and is {own_function}"
    if shapes != own_shapes:
        return f"{_who(layer)}, {function}, gave {shapes} and gives {own_shapes}"
    return f"{_who(layer)}, {function}, takes other tensors than it took"


def _who(layer: str) -> str:
    return f"layer {layer}" if layer else "the network itself"


def _function(call: Call) -> str:
    """Alike whether it is an operator, a method or a function, and whether it changes its input in place."""
    arguments = [repr(value) for value in call.args if not isinstance(value, Ref)]
    named = ((key, value) for key, value in call.kwargs.items() if key != "inplace" and value is not None)
    arguments += [f"{key}={value!r}" for key, value in named if not isinstance(value, Ref)]
    name = str(getattr(call.function, "__name__", type(call.function).__name__)).strip("_")
    constants = _OF_THIS_PROCESS.sub("", ", ".join(arguments))
    return f"{name}({constants})" if constants else name


def _shapes(call: Call, graph: Graph) -> str:
    return ", ".join("x".join(map(str, graph.shape(name))) for name in call.outputs)


def _taken(call: Call, graph: Graph) -> str:
    inputs = [name + (_numbers(graph.constants[name]) if name in graph.constants else "") for name in call.inputs]
    return f"{zlib.crc32(repr(inputs).encode()):08x}"


def _numbers(constant: Tensor) -> str:
    """Their last digits may be others on another processor."""
    x = constant.detach().cpu().flatten()
    x = (torch.view_as_real(x).flatten() if x.is_complex() else x).double()
    size, places = float(x.abs().sum()), torch.arange(1, len(x) + 1, dtype=torch.float64)
    return f"{size:.4g} {float(x @ places) / (size * len(x) or 1):.3f}"
