"""A network that was trained before: which of its layers stay as they are, always or for a while, and how much slower
the earlier ones train.

A frozen layer has no gradient, and its batch norm normalizes by its running statistics and keeps them: those of small
data would take from the weights what they were trained with. What is frozen is a function of the update's number, so a
run that resumes goes on with the same layers.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy.errors import ConvoyError
from convoy.models.weights import auxiliary_names, classifier_names
from convoy.recipe.schema import Duration
from convoy.terminal import did_you_mean

TRUNK = "trunk"  # all layers but the classifier, whatever these are called


def freeze_always(model: nn.Module, freeze: Sequence[str]) -> list[str]:
    """Freeze the layers that are never trained, with a note; a ConvoyError where a pattern fits nothing."""
    patterns = [part.partition(":")[0] for part in freeze]
    tensors = [_tensors(model, pattern) for pattern in patterns]
    always = [(p, names) for p, names, part in zip(patterns, tensors, freeze, strict=True) if ":" not in part]
    if not always:
        return []
    set_frozen(model, set(chain.from_iterable(names for _, names in always)), True)
    count = {
        trains: sum(p.numel() for p in model.parameters() if p.requires_grad is trains) for trains in (True, False)
    }
    if not count[True]:
        raise ConvoyError("optimizer.freeze leaves no layer to train: leave one out of it, or freeze trunk")
    return [f"{count[False]:,} of {sum(count.values()):,} parameters are frozen ({', '.join(p for p, _ in always)})"]


def thaws(model: nn.Module, freeze: Sequence[str], updates: Callable[[Duration], int]) -> dict[str, int]:
    """The tensors that are frozen for a while, each with the weight update from which on it is trained."""
    ends: dict[str, int] = {}
    never = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for pattern, colon, end in (part.partition(":") for part in freeze):
        for name in _tensors(model, pattern):
            if not colon:
                never.add(name)
            else:
                ends[name] = max(updates(Duration.parse(end)), ends.get(name, 0))
    if ends and all(name in ends or name in never for name, _ in model.named_parameters()):
        raise ConvoyError("optimizer.freeze leaves no layer to train at first: leave one out of it, or freeze trunk")
    return {name: end for name, end in ends.items() if name not in never}


def set_frozen(model: nn.Module, names: Collection[str], frozen: bool) -> None:
    """Freeze parameters, and batch norm layers by the names of their buffers, or let them be trained."""
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(not frozen)
    for path, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or f"{path}.running_mean" not in names:
            continue
        if frozen:
            vars(module)["train"] = partial(_stay, module)
        else:
            vars(module).pop("train", None)
        module.train(model.training)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    """In place of `train`, which the network's own calls for all of its modules."""
    return nn.Module.train(module, False)


def _tensors(model: nn.Module, pattern: str) -> set[str]:
    """The names of parameters and buffers of the layers that a pattern fits; a ConvoyError where there are none."""
    parameters = [name for name, _ in model.named_parameters()]
    everything = [*parameters, *(name for name, _ in model.named_buffers())]
    heads = [*classifier_names(model), *auxiliary_names(model)]
    names = {name for name in everything if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
    if not names and pattern == TRUNK:
        names = {name for name in everything if not name.startswith(tuple(f"{head}." for head in heads))}
    if names.isdisjoint(parameters):
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in parameters))
        tops = list(dict.fromkeys(layer.partition(".")[0] for layer in layers))
        near = did_you_mean(pattern, [*tops, *layers], otherwise=f"there are {', '.join(tops[:8])}, and {TRUNK}")
        raise ConvoyError(f"optimizer.freeze: {pattern!r} fits no layer of the network with parameters{near}")
    return names


def layer_scales(model: nn.Module, decay: float) -> Mapping[str, float]:
    """What the rate of every parameter is multiplied by: decay to the power of the layers between its own and the last
    one (BEiT: Bao et al., 2022, appendix; timm's `param_groups_layer_decay`).

    A network of timm says itself what its layers are. In any other a layer is a block, or what else stands in the
    network's lists of modules; a norm, or what has no matrix of weights, belongs to the layer before it.
    """
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is not None:
        from timm.models import group_parameters

        depths: dict[str, int] = group_parameters(model, matcher(coarse=False), reverse=True)
    else:
        number = sum(parameter.ndim > 1 for parameter in model.parameters())
        depths, depth = dict.fromkeys((name for name, _ in model.named_parameters()), 0), -1
        for path, module in _layers(model, number):
            parameters = list(module.named_parameters())
            depth += any(parameter.ndim > 1 for _, parameter in parameters)
            depths |= {f"{path}.{name}": max(depth, 0) for name, _ in parameters}
    last = max(depths.values(), default=0)
    return {name: decay ** (last - depth) for name, depth in depths.items()}


def _layers(module: nn.Module, number: int, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The layers in the order of the network, which has `number` matrices of weights: what holds more than half of them
    is no layer, but a network within it."""
    for name, child in module.named_children():
        size = sum(parameter.ndim > 1 for parameter in child.parameters())
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict) or (2 * size > number and size > 1):
            yield from _layers(child, number, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
